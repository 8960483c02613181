"""An upstream's answer that is larger than a gateway holds: ended, told in the protocol's own shape, and recorded."""

from __future__ import annotations

import json

import pytest
import zstandard

from fakes.engine import Answer, chunk, gzipped, json_answer, raw_stream, sse
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, wait_for
from outrider.types import CallState, Fidelity, Mode

ASKS = {
    CHAT: {"model": "m", "messages": MESSAGES},
    COMPLETIONS: {"model": "m", "prompt": "Hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "Hi"},
}
WAYS = pytest.mark.parametrize("path", ASKS)
NATIVE = ("openai_chat", "openai_completions", "anthropic_messages", "openai_responses")
LIMIT = 1 << 18
OPTIONS = {"mode": "train", "max_answer_mb": LIMIT / (1 << 20)}
TOO_LARGE = f"its answer is larger than {LIMIT} bytes"
ZEROS = b"0" * (64 << 20)


def failed(gateway, attempt_id="attempt-1"):
    call = gateway.call(attempt_id)
    assert (call.state, call.status) == (CallState.FAILED, 200 if call.streamed else 502)
    assert call.error == f"upstream_too_large: {TOO_LARGE}"
    assert call.fidelity is not Fidelity.EXACT
    return call


def told(path, error):
    """What the protocol's clients find in an error."""
    if path == "/v1/messages":
        assert error["type"] == "error"
        return error["error"]["message"]
    assert error["error"]["code"] == "upstream_too_large"
    return error["error"]["message"]


@WAYS
@pytest.mark.parametrize("native", [False, True], ids=["translated", "native"])
def test_a_plain_answer_that_is_too_large(engine, start, path, native):
    with start(**OPTIONS, **({"upstream_dialects": NATIVE} if native else {})) as gateway:
        engine.answers.append(Answer(chunks=[b'{"a":"', *[b"x" * 4096] * 200], end="hang"))
        got = gateway.post(f"/s/{gateway.open()}{path}", ASKS[path])
        assert got.status == 502
        assert TOO_LARGE in told(path, got.json)
        assert LIMIT // 2 < len(failed(gateway).response) <= LIMIT
        wait_for(lambda: engine.aborted == 1)
        assert len(engine.received) == 1  # another replica would say as much
        assert gateway.chat(gateway.open("next")).status == 200


@WAYS
def test_a_stream_that_is_too_large(engine, start, path):
    one = chunk({"content": "x" * 4096}) | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    if path == COMPLETIONS:
        one = {"choices": [{"index": 0, "text": "x" * 4096, "finish_reason": None}]}
    with start(**OPTIONS) as gateway:
        engine.answers.append(raw_stream(*sse(*[one] * 200, done=False), end="hang"))
        got = gateway.post(f"/s/{gateway.open()}{path}", ASKS[path] | {"stream": True})
        assert (got.status, got.clean) == (200, True)
        assert TOO_LARGE in json.dumps(got.events[-1])
        assert not [mark for mark in (b"[DONE]", b"message_stop", b"response.completed") if mark in got.body]
        call = failed(gateway)
        assert LIMIT // 2 < len(call.response) <= LIMIT
        assert got.body.count(b"x" * 4096) >= call.response.count(b"x" * 4096)  # what came before was passed on
        wait_for(lambda: engine.aborted == 1)


def test_one_that_is_as_large_as_may_be_is_an_answer(engine, start):
    def answer(size):
        text = {"choices": [{"index": 0, "message": {"content": ""}, "finish_reason": "stop"}]}
        text["choices"][0]["message"]["content"] = "x" * (size - len(json.dumps(text)))
        return json_answer(text)

    with start(**OPTIONS) as gateway:
        engine.answers.extend([answer(LIMIT), answer(LIMIT + 1)])
        assert [gateway.chat(gateway.open(name)).status for name in ("may", "not")] == [200, 502]
        assert len(gateway.call("may").response) == LIMIT


def packed(kind, body):
    if kind == "gzip":
        return gzipped(Answer(chunks=[body])).chunks[0]
    return zstandard.ZstdCompressor().compress(body)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_the_limit_holds_for_what_is_unpacked_too(engine, start, kind, streamed):
    media = "text/event-stream" if streamed else "application/json"
    body = packed(kind, b"data: " + ZEROS)
    assert len(body) < LIMIT
    with start(**OPTIONS) as gateway:
        engine.answers.append(Answer(headers={"content-type": media, "content-encoding": kind}, chunks=[body]))
        got = gateway.post(f"/s/{gateway.open()}{CHAT}", ASKS[CHAT] | {"stream": streamed})
        assert TOO_LARGE in got.body.decode()
        assert len(failed(gateway).response) <= LIMIT


def test_what_only_passes_through_may_have_any_size(engine, start):
    with start(**OPTIONS | {"mode": "passthrough"}) as gateway:
        engine.answers.append(Answer(chunks=[b"x" * 4096] * 200))
        got = gateway.post(f"/s/{gateway.open(mode=Mode.PASSTHROUGH)}{CHAT}", ASKS[CHAT])
        assert (got.status, len(got.body)) == (200, 4096 * 200)
