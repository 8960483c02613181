"""Streams: framing, what is hidden, what an end means."""

from __future__ import annotations

import http.client
import json
import threading
import zlib

import pytest
import zstandard

from fakes.engine import chunk, entries, gzipped, plain, raw_stream, sse, stream, usage
from fakes.gateway import CHAT, MESSAGES
from outrider.types import CallState, Fidelity, Mode


@pytest.mark.parametrize("asked", [False, True])
def test_S03_the_usage_chunk_is_shown_only_to_an_agent_that_asked(engine, gateway, asked):
    a = chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0), finish_reason="stop") | {"prompt_token_ids": [1]}
    empty = {"id": "", "model": "", "choices": []}
    bare = {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    engine.answers.append(stream(empty, a, usage(1, 1), bare))
    options = {"stream_options": {"include_usage": True}} if asked else {}
    got = gateway.chat(gateway.open(), stream=True, **options)
    shown = [event for event in got.events[:-1] if "usage" in event]
    assert shown == ([usage(1, 1), bare] if asked else [])
    assert got.events[0] == empty
    call = gateway.call()
    assert call.usage.completion_tokens == 1
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason


def test_S03_other_stream_options_of_the_agent_survive(engine, gateway):
    gateway.chat(gateway.open(), stream=True, stream_options={"continuous_usage_stats": False})
    assert engine.received[0].json["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}


def test_S01_a_character_cut_by_a_network_read_arrives_whole(engine, gateway):
    body = b"".join(sse(chunk({"content": "n\u00e9 \U0001f600 a\u2028b\u0085c"}, finish_reason="stop")))
    cut = body.index("\U0001f600".encode()) + 2
    engine.answers.append(raw_stream(body[:cut], body[cut:], chunk_delay_s=0.05))
    key = gateway.open(mode=Mode.RECORD)
    got = gateway.chat(key, stream=True)
    assert got.body == body
    assert gateway.call().response == body
    assert got.events[0]["choices"][0]["delta"]["content"] == "n\u00e9 \U0001f600 a\u2028b\u0085c"


def test_S02_comments_odd_framing_and_a_missing_end_are_read_as_meant(engine, gateway):
    a = json.dumps(chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]})
    b = json.dumps(chunk({}, token_ids=[6], logprobs=entries(-2.0), finish_reason="stop"))
    head, tail = b[: len(b) // 2].rsplit(" ", 1)
    two_lines = f"event: x\nid: 3\ndata: {head}\ndata: {tail}{b[len(b) // 2 :]}\n\n"
    body = f": ping\n\n:\n\ndata:{a}\r\n\r\n{two_lines}data: {json.dumps(usage(1, 2))}".encode()
    engine.answers.append(raw_stream(body[:40], body[40:90], body[90:], chunk_delay_s=0.02))
    got = gateway.chat(gateway.open(), stream=True)
    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == [5, 6]
    assert call.response == body
    assert b"token_ids" not in got.body


def test_S02_an_end_without_a_finish_reason_is_a_failure_and_is_told(engine, gateway):
    engine.answers.append(stream(chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)), done=False))
    got = gateway.chat(gateway.open(), stream=True)
    assert "ended before" in got.events[-1]["error"]["message"]
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.fidelity is Fidelity.BROKEN


def test_R13_unknown_fields_survive_both_ways_in_a_stream(engine, gateway):
    strange = chunk({"content": "a", "reasoning_content": "hm"}, finish_reason="stop", stop_reason=7)
    strange |= {"x_future": {"a": 1}, "prompt_token_ids": [1]}
    strange["choices"][0] |= {"token_ids": [5], "logprobs": entries(-1.0), "x_other": [1.50]}
    engine.answers.append(stream(strange, usage(1, 1)))
    got = gateway.chat(gateway.open(), stream=True, extra=1, return_token_ids=False)
    assert engine.received[0].json["extra"] == 1
    assert engine.received[0].json["return_token_ids"] is True
    shown = got.events[0]
    assert shown["x_future"] == {"a": 1}
    assert shown["choices"][0]["delta"] == {"content": "a", "reasoning_content": "hm"}
    assert shown["choices"][0]["stop_reason"] == 7
    assert shown["choices"][0]["x_other"] == [1.5]
    assert "prompt_token_ids" not in shown
    assert "token_ids" not in shown["choices"][0]
    assert gateway.call().fidelity is Fidelity.EXACT


def test_an_engine_that_answers_a_stream_request_with_a_whole_body_is_recorded(engine, gateway):
    engine.answers.append(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}))
    got = gateway.chat(gateway.open(), stream=True)
    assert got.json["choices"][0]["message"]["content"] == "x"
    assert gateway.call().fidelity is Fidelity.EXACT


# -- compression -------------------------------------------------------------------------------------------------------

FIRST = chunk({"content": "first"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]}
SECOND = chunk({"content": "second"}, token_ids=[6], logprobs=entries(-1.0), finish_reason="stop")
ASKS = {
    CHAT: {"messages": MESSAGES},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "Hi"},
}


def plain_bytes(encoding):
    """Undoes an encoding piece by piece."""
    if encoding == "gzip":
        return zlib.decompressobj(wbits=31).decompress
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress
    assert encoding is None
    return bytes


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("mode", [Mode.PASSTHROUGH, Mode.RECORD, Mode.TRAIN])
@pytest.mark.parametrize(
    ("packed", "accepts"), [(False, "gzip"), (True, "identity"), (True, "gzip"), (True, "zstd")], ids=str
)
def test_S12_the_first_event_arrives_before_the_second_is_made(engine, start, path, mode, packed, accepts):
    gate = threading.Event()
    answer = stream(FIRST, SECOND, done=False, gate=gate)
    engine.answers.append(gzipped(answer) if packed else answer)
    with start(mode="passthrough", pack_answers=True) as gateway:
        where = path if mode is Mode.PASSTHROUGH else f"/s/{gateway.open(mode=mode)}{path}"
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        body = json.dumps(ASKS[path] | {"stream": True}).encode()
        connection.request("POST", where, body, {"accept-encoding": accepts})
        answer = connection.getresponse()
        unpack = plain_bytes(answer.getheader("content-encoding"))
        assert answer.getheader("content-length") is None
        received = b""
        while b"first" not in received:
            received += unpack(answer.read1(65536))
        assert b"second" not in received  # the engine waits for us before it makes the second
        gate.set()
        while data := answer.read1(65536):
            received += unpack(data)
        connection.close()
        assert b"second" in received
        if mode is not Mode.PASSTHROUGH:
            assert gateway.call().state is CallState.COMPLETE
            assert gateway.call().response.count(b"first") == 1
