"""S09 and its kind in every protocol, passed through and translated: no broken answer is taken for a clean one.

Each fault is bytes on a real socket. The agent is told in its own protocol, the call is stored as failed with what had
come, and nothing of it can be trained on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import anthropic
import openai
import pytest

from fakes.engine import Answer, chunk, entries, json_answer, raw_stream
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES
from fakes.raw_upstream import Raw, RawUpstream, chunked_head, http, piece
from outrider.types import UPSTREAM_STATUS, CallState, Fidelity, Mode


def event(data, name=""):
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


CHAT_EVENTS = (
    event(chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]}),
    event(chunk({"content": "b"}, token_ids=[6], logprobs=entries(-2.0))),
)
CHAT_ERROR = event({"error": {"message": "engine dead", "type": "server_error", "code": 500}})
CHAT_BODY = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
MESSAGE = {"type": "message", "id": "m", "role": "assistant", "model": "m", "content": [], "usage": {"input_tokens": 1}}
BLOCK = {"index": 0, "content_block": {"type": "text", "text": ""}}
DELTA = {"index": 0, "delta": {"type": "text_delta", "text": "a"}}
MESSAGE_EVENTS = (
    event({"type": "message_start", "message": MESSAGE | {"stop_reason": None}}, "message_start"),
    event({"type": "content_block_start", **BLOCK}, "content_block_start"),
    event({"type": "content_block_delta", **DELTA}, "content_block_delta"),
)
MESSAGE_ERROR = event({"type": "error", "error": {"type": "overloaded_error", "message": "engine dead"}}, "error")
RESPONSE = {"object": "response", "id": "r", "status": "in_progress", "output": []}
RESPONSE_EVENTS = (
    event({"type": "response.created", "sequence_number": 0, "response": RESPONSE}, "response.created"),
    event({"type": "response.output_text.delta", "sequence_number": 1, "delta": "a"}, "response.output_text.delta"),
)
RESPONSE_ERROR = event(
    {"type": "error", "sequence_number": 2, "code": "server_error", "message": "engine dead"}, "error"
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A protocol, and how the upstream answers it."""

    path: str
    ask: dict
    body: dict
    events: tuple[bytes, ...]
    error: bytes
    dialects: tuple[str, ...] = ("openai_chat", "openai_completions")
    ids: list = field(default_factory=list)

    @property
    def translated(self):
        return self.body is CHAT_BODY and self.path != CHAT

    @property
    def options(self):
        return {"mode": "train", "upstream_dialects": self.dialects}


IDS = {"ids": [5, 6]}
CHATTY = {"body": CHAT_BODY, "events": CHAT_EVENTS, "error": CHAT_ERROR}
TEXT = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
TEXT_EVENTS = (event({"choices": [{"index": 0, "text": "a", "finish_reason": None, "token_ids": [5, 6]}]}),)
CLAUDE = {"path": "/v1/messages", "ask": {"model": "m", "max_tokens": 9, "messages": MESSAGES}}
GPT = {"path": "/v1/responses", "ask": {"model": "m", "input": "Hi"}}
WAYS = {
    "chat": Way(path=CHAT, ask={"model": "m", "messages": MESSAGES}, **CHATTY, **IDS),
    "completions": Way(
        path=COMPLETIONS, ask={"model": "m", "prompt": "Hi"}, body=TEXT, events=TEXT_EVENTS, error=CHAT_ERROR, **IDS
    ),
    "messages translated": Way(**CLAUDE, **CHATTY, **IDS),
    "messages": Way(
        **CLAUDE,
        body=MESSAGE | {"stop_reason": "end_turn"},
        events=MESSAGE_EVENTS,
        error=MESSAGE_ERROR,
        dialects=("anthropic_messages",),
    ),
    "responses translated": Way(**GPT, **CHATTY, **IDS),
    "responses": Way(
        **GPT,
        body=RESPONSE | {"status": "completed"},
        events=RESPONSE_EVENTS,
        error=RESPONSE_ERROR,
        dialects=("openai_responses",),
    ),
}
ALL_WAYS = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


def is_error(way, found):
    """An object that this protocol's clients take for an error, and that says what happened."""
    if way.path == "/v1/messages":
        return found["type"] == "error" and found["error"]["type"] and found["error"]["message"]
    if found.get("type") == "response.failed":
        return found["response"]["error"]["message"] and found["response"]["status"] == "failed"
    if found.get("type") == "error":
        return way.path == "/v1/responses" and found["message"] and isinstance(found["sequence_number"], int)
    return found["error"]["message"]


def is_last_word(found):
    return "error" in found or found.get("type") in ("error", "response.failed")


def ends(body):
    """What a client would take for the clean end of an answer."""
    return [mark for mark in (b"[DONE]", b"message_stop", b"response.completed", b'"stop"') if mark in body]


def failed(gateway, attempt_id):
    call = gateway.call(attempt_id)
    assert call.state is CallState.FAILED, attempt_id
    assert call.fidelity is not Fidelity.EXACT, attempt_id
    return call


# -- plain answers -----------------------------------------------------------------------------------------------------


def plain_faults(body):
    whole = json.dumps(body).encode()
    head = chunked_head("application/json")
    return {
        "empty": Raw(parts=[http(b"")]),
        "no content": Raw(parts=[b"HTTP/1.1 204 No Content\r\n\r\n"]),
        "truncated": Raw(parts=[http(whole[:-5])]),
        "a page of a proxy": Raw(parts=[http(b"<html>Bad gateway</html>", kind="text/html")]),
        "null": Raw(parts=[http(b"null")]),
        "a list": Raw(parts=[http(b"[]")]),
        "nothing in it": Raw(parts=[http(b"{}")]),
        "something else": Raw(parts=[http(b'{"status": "ok"}')]),
        "bad UTF-8": Raw(parts=[http(b'{"choices": "\xff\xfe')]),
        "garbled gzip": Raw(parts=[b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\nxxxx"]),
        "nobody": Raw(end="reset"),
        "shorter than promised": Raw(parts=[http(whole, length=len(whole) + 5)]),
        "reset inside": Raw(parts=[http(whole[:9], length=len(whole))], end="reset"),
        "a chunk that is none": Raw(parts=[head, b"zz\r\n" + whole]),
        "no last chunk": Raw(parts=[head + piece(whole)]),
        "no HTTP": Raw(parts=[b"SSH-2.0-OpenSSH_9.6\r\n"]),
        "unbroken": Raw(parts=[http(whole)]),
    }


@ALL_WAYS
@BOTH
def test_S09_a_broken_plain_answer_is_told_and_kept_out(start, way, streamed):
    faults = plain_faults(way.body)
    with RawUpstream(*faults.values()) as upstream, start(upstream=upstream.base_url, **way.options) as gateway:
        for fault in faults:
            got = gateway.post(f"/s/{gateway.open(fault)}{way.path}", way.ask | {"stream": streamed})
            if fault == "unbroken":
                assert got.status == 200
                assert gateway.call(fault).state is CallState.COMPLETE
                continue
            assert got.status == 502, fault
            assert is_error(way, got.json), fault
            call = failed(gateway, fault)
            assert call.status == 502
            unnamed = way.translated and fault in ("nothing in it", "something else")  # the translator's own words
            assert call.error.startswith("upstream_") or unnamed, fault


@ALL_WAYS
@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirection_does_not_lead_an_agent_around_the_gateway(start, engine, way, status):
    """Such as http:// for https://, given as --upstream."""
    with start(**way.options) as gateway:
        engine.answers.append(Answer(status=status, headers={"location": "https://elsewhere/v1"}))
        got = gateway.post(f"/s/{gateway.open()}{way.path}", way.ask)
        assert (got.status, got.headers.get("location")) == (502, None)
        assert is_error(way, got.json)
        assert "--upstream has to name the target" in failed(gateway, "attempt-1").error


# -- streams -----------------------------------------------------------------------------------------------------------

HEAD = chunked_head()
END = piece(b"")


def stream_faults(way):
    """By name, with what the call's error says."""
    begun = HEAD + b"".join(map(piece, way.events))
    ended = "ended before" if way.translated else "upstream_cut"
    return {
        "reset": (Raw(parts=[begun], end="reset"), "upstream_cut"),
        "no last chunk": (Raw(parts=[begun]), "upstream_cut"),
        "a chunk that is none": (Raw(parts=[begun, b"zz\r\n"]), "upstream_invalid"),
        "half an event": (Raw(parts=[begun + piece(way.events[-1][:-9])], end="reset"), "upstream_cut"),
        "an end without a finish": (Raw(parts=[begun + END], end="keep"), ended),
        "an error": (Raw(parts=[begun + piece(way.error) + END], end="keep"), "engine dead"),
        "an error and a cut": (Raw(parts=[begun + piece(way.error)], end="reset"), "engine dead"),
    }


@ALL_WAYS
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.RECORD])
def test_S09_a_broken_stream_ends_with_an_error_and_keeps_what_had_come(start, way, mode):
    faults = stream_faults(way)
    answers = [answer for answer, _ in faults.values()]
    with RawUpstream(*answers) as upstream, start(upstream=upstream.base_url, **way.options) as gateway:
        for fault, (_, words) in faults.items():
            got = gateway.post(f"/s/{gateway.open(fault, mode=mode)}{way.path}", way.ask | {"stream": True})
            assert (got.status, got.clean) == (200, True), fault
            assert is_error(way, got.events[-1]), fault
            assert [found for found in got.events if is_last_word(found)] == got.events[-1:], fault
            assert ends(got.body) == [], fault
            call = failed(gateway, fault)
            assert words in call.error, fault
            found = [choice.token_ids.tolist() for choice in call.choices if len(choice.token_ids)]
            assert found == ([way.ids] if way.ids else []), fault
            assert call.response.startswith(b"".join(way.events)), fault


@ALL_WAYS
def test_S09_a_stream_that_never_began_has_an_honest_status(start, way):
    nothing, head = Raw(parts=[HEAD + END], end="keep"), Raw(parts=[HEAD], end="reset")
    with RawUpstream(nothing, head) as upstream, start(upstream=upstream.base_url, **way.options) as gateway:
        for fault in ("nothing", "head"):
            got = gateway.post(f"/s/{gateway.open(fault)}{way.path}", way.ask | {"stream": True})
            assert got.status == 502
            assert is_error(way, got.json)
            assert "upstream_cut" in failed(gateway, fault).error


# -- the SDKs ----------------------------------------------------------------------------------------------------------


def use_sdk(way, url):
    """Run the protocol's SDK to the end of its stream."""
    if way.path == "/v1/messages":
        with (
            anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as claude,
            claude.messages.stream(**way.ask) as events,
        ):
            events.get_final_message()
        return
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as gpt:
        if way.path == "/v1/responses":
            last = list(gpt.responses.create(**way.ask, stream=True))[-1]
            if last.type in ("error", "response.failed"):
                raise openai.APIError("told by an event", None, body=None)
        elif way.path == CHAT:
            list(gpt.chat.completions.create(**way.ask, stream=True))
        else:
            list(gpt.completions.create(**way.ask, stream=True))


@ALL_WAYS
def test_S09_the_sdks_raise(start, way):
    faults = stream_faults(way)
    answers = [answer for answer, _ in faults.values()]
    with RawUpstream(*answers) as upstream, start(upstream=upstream.base_url, **way.options) as gateway:
        url = f"{gateway.base_url}/s/{gateway.open()}"
        for _ in faults:
            with pytest.raises((openai.APIError, anthropic.APIError)):
                use_sdk(way, url)


# -- time limits -------------------------------------------------------------------------------------------------------


@ALL_WAYS
@pytest.mark.parametrize("stage", ["first byte", "chunk", "total"])
def test_each_time_limit_is_told_and_stored(start, engine, way, stage):
    limit = {"first byte": "upstream_first_byte_timeout_s", "chunk": "upstream_chunk_timeout_s"}
    code = {"first byte": "upstream_first_byte_timeout", "chunk": "upstream_chunk_timeout"}
    name = limit.get(stage, "upstream_timeout_s")
    with start(**way.options, **{name: 0.4}) as gateway:
        engine.answers.append(Answer(delay_s=60) if stage == "first byte" else raw_stream(*way.events, end="hang"))
        got = gateway.post(f"/s/{gateway.open()}{way.path}", way.ask | {"stream": True})
        told = got.json if stage == "first byte" else got.events[-1]
        assert got.status == (504 if stage == "first byte" else 200)
        assert is_error(way, told)
        assert "0.4 s" in json.dumps(told)
        call = failed(gateway, "attempt-1")
        assert call.error.startswith(code.get(stage, "upstream_timeout") + ": ")
        assert call.status == got.status


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_a_code_stands_where_the_protocol_has_a_place_for_it(start, path):
    way = WAYS["chat" if path == CHAT else "responses translated"]
    with start(upstream="http://127.0.0.1:1", **way.options) as gateway:
        got = gateway.post(f"/s/{gateway.open()}{path}", way.ask)
        assert got.json["error"]["code"] == "upstream_unreachable"


def test_R11_an_overflow_that_is_told_in_a_stream_stays_a_refusal_in_the_store(start, engine):
    """So the reconciler can tell it from a stream that broke off."""
    with start(mode="train") as gateway:
        overflow = {"error": {"message": "maximum context length is 8 tokens", "code": "context_length_exceeded"}}
        engine.answers.append(json_answer(overflow, status=400))
        got = gateway.post(f"/s/{gateway.open()}/v1/responses", {"model": "m", "input": "Hi", "stream": True})
        call = failed(gateway, "attempt-1")
        assert (got.status, call.status) == (200, 200)
        assert call.error == f"{UPSTREAM_STATUS}400"
