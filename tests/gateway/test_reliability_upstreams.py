"""Upstreams that break off, go silent or lie inside a stream: told to the agent, recorded as failed."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest

from fakes.engine import Answer, chunk, entries, plain, raw_stream, sse, usage
from fakes.gateway import CHAT, MESSAGES, wait_for
from outrider import trajectory
from outrider.gateway.sse import EventSplitter
from outrider.types import CallState, Fidelity, Mode

FIRST = chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]}
LAST = chunk({"content": "c"}, token_ids=[7], logprobs=entries(-3.0), finish_reason="stop")
HEAD, END, DONE = sse(FIRST, LAST)
MODES = pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.RECORD])


def told(got):
    """The error that an agent reads in a stream, which has no [DONE] then."""
    events = [event.data for event in EventSplitter().feed(got.body) if event.data]
    assert b"[DONE]" not in events
    return json.loads(events[-1])["error"]["message"]


@MODES
@pytest.mark.parametrize("rest", [b"d", b"data", b"data: ", b"data: {", END.rstrip(), b"event: x", b"x\n", b": ping"])
def test_S09_an_error_after_half_an_event_is_an_event_of_its_own(engine, gateway, mode, rest):
    engine.answers.append(raw_stream(HEAD, rest if rest != END.rstrip() else rest.replace(b'"stop"', b"null")))
    got = gateway.chat(gateway.open(mode=mode), stream=True)
    assert told(got)
    assert gateway.call().state is CallState.FAILED


@MODES
def test_a_last_event_without_its_blank_line_still_ends_the_stream(engine, gateway, mode):
    engine.answers.append(raw_stream(HEAD, END, DONE.rstrip()))
    got = gateway.chat(gateway.open(mode=mode), stream=True)
    assert got.body.endswith(b"data: [DONE]")
    assert gateway.call().state is CallState.COMPLETE


GARBAGE = {
    "no JSON": b"data: {broken\n\n",
    "bad UTF-8": b'data: {"choices": [{"index": 0, "delta": {"content": "\xff"}}]}\n\n',
    "bad UTF-8 elsewhere": b'data: {"choices": [{"index": 0, "delta": {}}], "x": "\xc3"}\n\n',
    "a number": b"data: 5\n\n",
    "a list": b"data: []\n\n",
    "too deep": b'data: {"x": ' + b"[" * 100_000 + b"\n\n",
}


@MODES
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_an_event_that_nobody_can_read_fails_the_stream(engine, gateway, mode, garbage):
    engine.answers.append(raw_stream(HEAD, garbage, END, sse(usage(1, 2))[0], DONE))
    got = gateway.chat(gateway.open(mode=mode), stream=True)
    assert "cannot be read" in told(got)
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.fidelity is not Fidelity.EXACT
    assert garbage in call.response


@MODES
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_a_plain_answer_that_is_no_UTF_8_is_no_answer(engine, gateway, mode, path):
    good = plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}).chunks[0]
    engine.answers.append(Answer(chunks=[good.replace(b'"content": "x"', b'"content": "\xff"')]))
    asked = {"model": "policy", "max_tokens": 5, "messages": MESSAGES, "input": "Hi"}
    got = gateway.post(f"/s/{gateway.open(mode=mode)}{path}", asked)
    assert got.status == 502
    assert gateway.call().state is CallState.FAILED


@pytest.mark.parametrize(("logprob", "fidelity"), [(0.5, Fidelity.BROKEN), (1e-6, Fidelity.EXACT)])
def test_log_probs_above_0_keep_one_call_out_and_not_its_whole_trajectory(engine, gateway, logprob, fidelity):
    engine.answers.append(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, logprob)}))
    key = gateway.open()
    gateway.chat(key)
    gateway.chat(key)
    calls = gateway.recorded(2)
    assert [call.fidelity for call in calls] == [fidelity, Fidelity.EXACT]
    trajectory.build(calls)


def test_a_client_that_leaves_an_upstream_that_never_ends_leaves_nothing_behind(engine, gateway):
    engine.answers.append(raw_stream(HEAD, END, DONE, end="hang"))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {"messages": MESSAGES, "stream": True})
    received = b""
    while b'"stop"' not in received:
        received += raw.recv(4096)
    raw.close()
    wait_for(lambda: gateway.client.health()["in_flight"] == 0)
    call = gateway.call()
    assert call.state is CallState.COMPLETE
    np.testing.assert_array_equal(call.choices[0].token_ids, [5, 7])


ABSURD = {
    "usage": {"usage": {"prompt_tokens": 10**30, "completion_tokens": 10**400}},
    "negative usage": {"usage": {"prompt_tokens": -1, "completion_tokens": -(10**30)}},
    "index": {
        "choices": [{"index": 10**30, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]
    },
    "finish reason": {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "\ud800\x00"}]},
    "error": {"error": {"message": "\ud800\x00", "code": 10**400}},
}


@MODES
@pytest.mark.parametrize("fields", ABSURD.values(), ids=ABSURD.keys())
def test_absurd_values_are_recorded_like_others(engine, gateway, mode, fields):
    good = json.loads(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}).chunks[0])
    engine.answers.append(Answer(chunks=[json.dumps(good | fields).encode()]))
    assert gateway.chat(gateway.open(mode=mode)).status in (200, 502)
    assert gateway.call().fidelity is not Fidelity.EXACT
    assert gateway.client.stats()["not_recorded"] == {}


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_passes_through_whatever_length_it_has(start, caplog, status):
    with (
        socket.create_server(("127.0.0.1", 0)) as upstream,
        start(mode="passthrough", upstream=f"http://127.0.0.1:{upstream.getsockname()[1]}") as gateway,
    ):
        answering = threading.Thread(target=answer_by_hand, args=(upstream, status))
        answering.start()
        got = gateway.post(CHAT, {"messages": MESSAGES})
        answering.join()
    assert (got.status, got.body, got.clean) == (status, b"", True)
    assert not caplog.records


def answer_by_hand(upstream, status):
    connection, _ = upstream.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status)


@MODES
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("after", [[], [b": ping\n\n"] * 500], ids=["silent", "pinging"])
def test_an_upstream_that_never_ends_its_stream_keeps_nobody_waiting(engine, gateway, mode, path, after):
    engine.answers.append(raw_stream(HEAD, END, sse(usage(1, 2))[0], DONE, *after, end="hang", chunk_delay_s=0.05))
    asked = {"model": "policy", "max_tokens": 5, "messages": MESSAGES, "input": "Hi", "stream": True}
    got = gateway.post(f"/s/{gateway.open(mode=mode)}{path}", asked)
    events = [event for event in EventSplitter().feed(got.body) if event.data]
    assert got.clean
    assert events[-1].data == b"[DONE]" or events[-1].name in (b"message_stop", b"response.completed")
    call = gateway.call()
    assert (call.state, call.fidelity) == (CallState.COMPLETE, Fidelity.EXACT)
    assert call.duration_s < 20
    wait_for(lambda: engine.aborted == 1)
    engine.answers.clear()
    assert gateway.post(f"/s/{gateway.open('attempt-2', mode=mode)}{path}", asked).status == 200


def test_a_stream_that_is_closed_without_its_last_chunk_is_cut(start):
    with (
        socket.create_server(("127.0.0.1", 0)) as upstream,
        start(mode="train", upstream=f"http://127.0.0.1:{upstream.getsockname()[1]}", upstream_retries=0) as gateway,
    ):
        serving = threading.Thread(target=half_a_stream_by_hand, args=(upstream,))
        serving.start()
        got = gateway.chat(gateway.open(), stream=True)
        serving.join()
        assert "closed the connection" in told(got)
        assert gateway.call().state is CallState.FAILED


def half_a_stream_by_hand(upstream):
    connection, _ = upstream.accept()
    with connection:
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(HEAD), HEAD))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_never_trained_on(engine, gateway, reason):
    engine.answers.append(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0), "finish_reason": reason}))
    gateway.chat(gateway.open())
    assert gateway.call().fidelity is Fidelity.BROKEN
    assert reason in gateway.call().fidelity_reason
