"""What goes wrong upstream, in the client or in the store is told, recorded and survived."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fakes.engine import Answer, chunk, entries, json_answer, plain, raw_stream, sse, stream, usage
from fakes.gateway import CHAT, MESSAGES, wait_for
from outrider.errors import StoreBusy, StoreError
from outrider.types import CallState, Fidelity, Mode

FIRST = chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]}
SECOND = chunk({"content": "b"}, token_ids=[6], logprobs=entries(-2.0))
LAST = chunk({"content": "c"}, token_ids=[7], logprobs=entries(-3.0), finish_reason="stop")
BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


def told(got, status=502):
    """The error that ends an answer: a status, or the last event of a stream that has no ``[DONE]``."""
    if got.headers["content-type"].startswith("text/event-stream"):
        assert "[DONE]" not in got.events
        return got.events[-1]["error"]["message"]
    assert got.status == status
    return got.json["error"]["message"]


# -- upstream ----------------------------------------------------------------------------------------------------------


def test_S09_an_error_event_inside_a_stream_fails_the_call_and_reaches_the_agent(engine, gateway):
    error = {"error": {"message": "engine dead", "code": 500}}
    engine.answers.append(stream(FIRST, SECOND, error, done=False))
    got = gateway.chat(gateway.open(), stream=True)
    assert got.events[-1] == error
    assert [event["choices"][0]["delta"]["content"] for event in got.events[:2]] == ["a", "b"]
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.error == "engine dead"
    assert call.fidelity is Fidelity.BROKEN
    assert call.choices[0].token_ids.tolist() == [5, 6]
    # A retry by the client is a new call.
    key = gateway.open("attempt-2")
    assert gateway.chat(key, stream=True).events[-1] == "[DONE]"


def test_S09_an_error_after_the_finish_reason_fails_the_call_too(engine, gateway):
    engine.answers.append(stream(FIRST, LAST, {"object": "error", "message": "late"}))
    gateway.chat(gateway.open(), stream=True)
    assert gateway.call().state is CallState.FAILED
    assert gateway.call().error == "late"


def test_S09_a_reset_inside_a_stream_fails_the_call_and_is_told(engine, gateway):
    engine.answers.append(stream(FIRST, SECOND, done=False, end="reset"))
    got = gateway.chat(gateway.open(), stream=True)
    assert "closed the connection" in told(got)
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.choices[0].token_ids.tolist() == [5, 6]
    assert call.fidelity is Fidelity.BROKEN


def test_half_an_event_at_a_cut_is_not_sent_on(engine, gateway):
    whole = sse(SECOND)[0]
    half = whole[: whole.index(b'"b"') + 3]
    engine.answers.append(raw_stream(sse(FIRST)[0], half, end="reset", chunk_delay_s=0.05))
    got = gateway.chat(gateway.open(mode=Mode.RECORD), stream=True)
    assert half not in got.body
    assert len(got.events) == 2
    assert gateway.call().response.endswith(half)


UNREADABLE = {
    "empty": Answer(chunks=[b""]),
    "truncated": Answer(chunks=[b'{"choices": [{"index": 0, "mess']),
    "not json": Answer(chunks=[b"<html>hello</html>"]),
    "not an object": Answer(chunks=[b"[]"]),
    "no choices": json_answer({"id": "x"}),
    "empty choices": json_answer({"id": "x", "choices": []}),
    "deep": Answer(chunks=[b'{"choices": ' + b"[" * 100_000]),
    "cut": Answer(headers={"content-length": "999"}, chunks=[b'{"choices": ['], end="reset"),
    "empty stream": stream(done=False),
    "stream of nothing but its end": stream(),
    "stream of comments": raw_stream(b": ping\n\n", b": ping\n\n"),
    "stream of garbage": raw_stream(b"data: {broken\n\n", b"data: [DONE]\n\n"),
}


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.RECORD])
def test_a_200_that_holds_no_answer_is_never_a_clean_one(engine, gateway, answer, mode):
    engine.answers.append(answer)
    got = gateway.chat(gateway.open(mode=mode), stream=True)
    if got.status == 200:
        assert b"[DONE]" not in got.body
        assert b'"error"' in got.body
    else:
        assert told(got)
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.fidelity is not Fidelity.EXACT
    assert call.error


def test_an_error_object_with_status_200_is_passed_on_and_stored_as_failed(engine, gateway):
    engine.answers.append(json_answer({"error": {"message": "quota"}}))
    got = gateway.chat(gateway.open())
    assert got.json == {"error": {"message": "quota"}}
    assert gateway.call().state is CallState.FAILED
    assert gateway.call().error == "quota"


def test_unusual_types_in_a_readable_answer_are_passed_on_and_kept_out_of_training(engine, gateway):
    choice = {"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}
    engine.answers.append(plain(choice, usage={"prompt_tokens": "2", "completion_tokens": "2"}))
    got = gateway.chat(gateway.open())
    assert got.json["choices"][0]["message"]["content"] == "x"
    assert "token_ids" not in got.json["choices"][0]
    assert gateway.call().state is CallState.COMPLETE
    assert gateway.call().fidelity is Fidelity.BROKEN


@BOTH
def test_an_upstream_that_is_not_there_is_502_and_stored(engine, start, streamed):
    with start(upstream="http://127.0.0.1:1") as gateway:
        got = gateway.chat(gateway.open(), stream=streamed)
        assert got.status == 502
        assert "cannot connect" in told(got)
        assert gateway.call().state is CallState.FAILED
        assert gateway.call().status == 502


@BOTH
def test_an_upstream_that_takes_too_long_is_told_and_aborted(engine, start, streamed):
    with start(upstream_timeout_s=0.3) as gateway:
        engine.answers.append(raw_stream(sse(FIRST)[0], end="hang") if streamed else Answer(end="hang"))
        assert "0.3 s" in told(gateway.chat(gateway.open(), stream=streamed), 504)
        assert gateway.call().state is CallState.FAILED
        wait_for(lambda: engine.aborted == 1)


def test_a_restarted_upstream_is_found_again_without_a_failed_call(engine, gateway):
    key = gateway.open()
    gateway.chat(key)  # leaves an idle connection
    engine.stop()
    engine.start()
    assert gateway.chat(key).status == 200
    assert [call.state for call in gateway.recorded(2)] == [CallState.COMPLETE] * 2


def test_S16_more_calls_than_a_default_pool_holds_run_at_once(engine, gateway):
    key = gateway.open()
    started = threading.Event()
    engine.answers.extend(Answer(chunks=[b"", b"x"], gate=started) for _ in range(160))
    with ThreadPoolExecutor(160) as pool:
        futures = [pool.submit(gateway.chat, key) for _ in range(160)]
        wait_for(lambda: len(engine.received) == 160, timeout_s=60)  # none of them has ended yet
        started.set()
        assert len([future.result(60) for future in futures]) == 160


# -- client ------------------------------------------------------------------------------------------------------------


@BOTH
def test_S11_a_client_that_leaves_before_the_first_byte_cancels_the_call(engine, gateway, streamed):
    engine.answers.append(Answer(delay_s=60))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {"messages": MESSAGES, "stream": streamed})
    wait_for(lambda: engine.received)
    raw.close()
    wait_for(lambda: engine.aborted == 1)  # the answer by itself would take longer than that is waited for
    call = gateway.call()
    assert call.state is CallState.CANCELLED
    assert call.fidelity is not Fidelity.EXACT
    wait_for(lambda: gateway.client.health()["in_flight"] == 0)


def test_S11_a_client_with_a_large_request_is_seen_to_leave_too(engine, gateway):
    engine.answers.append(Answer(delay_s=60))
    messages = [{"role": "user", "content": "x" * 500_000}]
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {"messages": messages})
    wait_for(lambda: engine.received)
    raw.close()
    wait_for(lambda: engine.aborted == 1)
    assert gateway.call().state is CallState.CANCELLED


def test_S11_a_client_that_leaves_inside_a_stream_cancels_it(engine, gateway):
    engine.answers.append(raw_stream(sse(FIRST)[0], sse(SECOND)[0], end="hang"))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {"messages": MESSAGES, "stream": True})
    received = b""
    while b'"b"' not in received:
        received += raw.recv(4096)
    raw.close()
    wait_for(lambda: engine.aborted == 1)
    call = gateway.call()
    assert call.state is CallState.CANCELLED
    assert call.choices[0].token_ids.tolist() == [5, 6]
    assert call.fidelity is Fidelity.BROKEN


def test_S11_a_client_that_leaves_right_after_the_finish_reason_is_recorded_whole(engine, gateway):
    gate = threading.Event()
    engine.answers.append(stream(FIRST, SECOND, LAST, usage(1, 3), gate=gate))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {"messages": MESSAGES, "stream": True})
    received = b""
    while b'"stop"' not in received:
        received += raw.recv(4096)
    raw.close()
    wait_for(lambda: gateway.client.health()["in_flight"] == 1)
    time.sleep(0.2)  # the gateway notices
    gate.set()
    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert engine.aborted == 0


def test_a_client_that_leaves_inside_its_request_leaves_nothing_behind(engine, gateway):
    raw = socket.create_connection(("127.0.0.1", gateway.port))
    path = f"/s/{gateway.open()}{CHAT}".encode()
    raw.sendall(b"POST " + path + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
    time.sleep(0.1)
    raw.close()
    wait_for(lambda: gateway.client.stats()["refused"] == {"client_gone": 1})
    assert engine.received == []


# -- store -------------------------------------------------------------------------------------------------------------


def break_store(gateway, monkeypatch, error, at_once):
    def append_call(call):
        if at_once:
            raise error
        future = Future()
        future.set_exception(error)
        return future

    monkeypatch.setattr(gateway.store, "append_call", append_call)


@BOTH
@pytest.mark.parametrize(
    ("error", "at_once", "code"),
    [(StoreError("disk is full"), False, "store_failed"), (StoreBusy("queue is full"), True, "store_busy")],
    ids=["failed", "busy"],
)
def test_a_call_that_cannot_be_stored_is_never_answered_cleanly(
    engine, gateway, monkeypatch, streamed, error, at_once, code
):
    key = gateway.open()
    break_store(gateway, monkeypatch, error, at_once)
    got = gateway.chat(key, stream=streamed)
    if streamed:
        assert "[DONE]" not in got.events
        assert got.events[-1]["error"]["code"] == code
    else:
        assert got.status == 503
        assert got.json["error"]["code"] == code
        assert int(got.headers["retry-after"]) > 0
        assert b"w\\u00f6rld" not in got.body
    monkeypatch.undo()
    stats = gateway.client.stats()
    assert stats["not_recorded"] == {code: 1}
    assert stats["calls"] == {}
    assert gateway.chat(key, stream=streamed).status == 200
    assert len(gateway.recorded(1)) == 1


def test_a_store_that_cannot_be_read_refuses_with_503(engine, gateway, monkeypatch):
    key = gateway.open()

    def session(key_hash):
        raise StoreError("disk I/O error")

    monkeypatch.setattr(gateway.store, "session", session)
    got = gateway.chat(key)
    assert got.status == 503
    assert engine.received == []


@BOTH
def test_the_answer_ends_only_after_the_commit(engine, gateway, monkeypatch, streamed):
    key = gateway.open()
    waiting: list[Future[int]] = []
    monkeypatch.setattr(gateway.store, "append_call", lambda call: waiting.append(Future()) or waiting[0])
    raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES, "stream": streamed})
    wait_for(lambda: waiting)
    received = b""
    if streamed:
        while b'"stop"' not in received:
            received += raw.recv(65536)
    raw.settimeout(0.3)
    with pytest.raises(TimeoutError):
        raw.recv(65536)
    assert b"[DONE]" not in received
    waiting[0].set_result(1)
    raw.settimeout(60)
    while (b"[DONE]" if streamed else b'"usage"') not in received:
        piece = raw.recv(65536)
        assert piece, received
        received += piece
    raw.close()


def test_an_unexpected_failure_of_ours_is_a_500_in_the_protocols_shape(engine, gateway, monkeypatch, caplog):
    def session(key_hash):
        raise ZeroDivisionError

    key = gateway.open()
    monkeypatch.setattr(gateway.store, "session", session)
    got = gateway.chat(key)
    assert got.status == 500
    assert got.json["error"]["code"] == "gateway"
    assert key not in caplog.text
    assert "ZeroDivisionError" in caplog.text
