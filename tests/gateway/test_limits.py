"""What one caller, or all of them, may ask of a gateway at a time."""

from __future__ import annotations

import gzip
import socket
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import zstandard

from fakes.engine import Answer, Sampled
from fakes.gateway import CHAT, MESSAGES, wait_for
from fakes.process import GatewayProcess
from outrider.errors import RequestError
from outrider.gateway.admission import Refused
from outrider.gateway.encoding import decode_request
from outrider.gateway.limits import MAX_CALLERS, Limits, TooFast

# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_callers_rate_is_its_own_and_refills():
    now = [0.0]
    limits = Limits(max_in_flight=10, rate_per_key=2.0, clock=lambda: now[0])
    limits.take("a")
    limits.take("a")
    with pytest.raises(TooFast) as caught:
        limits.take("a")
    assert caught.value.retry_after_s == 1
    limits.take("b")
    now[0] = 0.5
    limits.take("a")
    with pytest.raises(TooFast):
        limits.take("a")
    now[0] = 100.0  # a rest gives no more than a second's worth
    limits.take("a")
    limits.take("a")
    with pytest.raises(TooFast):
        limits.take("a")


def test_a_slow_rate_says_how_long_to_wait():
    limits = Limits(max_in_flight=1, rate_per_key=0.1, clock=lambda: 0.0)
    limits.take("a")
    with pytest.raises(TooFast) as caught:
        limits.take("a")
    assert caught.value.retry_after_s == 10


def test_callers_are_forgotten_at_last():
    limits = Limits(max_in_flight=1, rate_per_key=1.0)
    for n in range(MAX_CALLERS + 50):
        limits.take(str(n))
    assert len(limits._buckets) == MAX_CALLERS


def test_calls_under_way_are_counted_down_whatever_happens():
    limits = Limits(max_in_flight=1, rate_per_key=0)

    def fail():
        with limits:
            with pytest.raises(Refused):
                limits.__enter__()
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert limits.in_flight == 0


def test_one_key_too_fast_is_429_and_another_is_served(engine, start):
    with start(mode="record", rate_per_key=1.0) as gateway:
        mine, other = gateway.open("attempt-1"), gateway.open("attempt-2")
        statuses = [gateway.chat(mine) for _ in range(3)]
        refused = [got for got in statuses if got.status == 429]
        assert statuses[0].status == 200
        assert refused
        assert int(refused[0].headers["retry-after"]) >= 1
        assert refused[0].json["error"]["type"] == "rate_limit_error"
        assert gateway.chat(other).status == 200
        provider = [gateway.post(CHAT, {"messages": MESSAGES}, {"x-api-key": key}) for key in ("a", "b")]
        assert [got.status for got in provider] == [200, 200]
        assert gateway.client.stats()["refused"] == {"rate_limit_exceeded": len(refused)}


def test_too_many_calls_under_way_are_503_and_the_sdk_lives_through_it(engine, start):
    with start(mode="train", max_in_flight=1) as gateway:
        gate = threading.Event()
        engine.answers.append(Answer(chunks=[b'{"choices": [', b"]}"], gate=gate))
        key = gateway.open()
        raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES})
        wait_for(lambda: engine.received)
        got = gateway.chat(key)
        assert (got.status, got.json["error"]["code"]) == (503, "too_many_in_flight")
        assert int(got.headers["retry-after"]) >= 1

        def end_the_other_once_this_is_refused():
            wait_for(lambda: gateway.client.stats()["refused"] == {"too_many_in_flight": 2})
            gate.set()

        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(end_the_other_once_this_is_refused)
            with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="x", max_retries=12) as client:
                reply = client.chat.completions.create(model="m", messages=MESSAGES)
            ending.result(60)
        assert reply.choices[0].message.content == Sampled().text
        raw.close()


# -- bodies ------------------------------------------------------------------------------------------------------------

MB = 1 << 20
BOMBS = {
    "gzip": gzip.compress(b"\0" * (200 * MB)),
    "deflate": zlib.compress(b"\0" * (200 * MB)),
    "zstd": zstandard.compress(b"\0" * (200 * MB)),
}


@pytest.mark.parametrize("encoding", BOMBS)
def test_a_bomb_is_never_unpacked(encoding):
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="once unpacked") as caught:
            decode_request(BOMBS[encoding], encoding.encode(), MB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 4 * MB


@pytest.mark.parametrize("encoding", BOMBS)
def test_a_bomb_is_413_and_goes_nowhere(engine, start, encoding):
    with start(mode="train", max_body_mb=1.0) as gateway:
        got = gateway.post(f"/s/{gateway.open()}{CHAT}", BOMBS[encoding], {"content-encoding": encoding})
        assert got.status == 413
        assert engine.received == []


PACKERS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("encoding", PACKERS)
@pytest.mark.parametrize("size", [0, 1, 999, 1000])
def test_what_fits_is_unpacked(encoding, size):
    assert decode_request(PACKERS[encoding](b"x" * size), encoding.encode(), 1000) == b"x" * size


def test_gzip_in_several_members_is_one_body():
    packed = gzip.compress(b"ab") + gzip.compress(b"cd")
    assert decode_request(packed, b"GZIP", 4) == b"abcd"
    with pytest.raises(RequestError, match="once unpacked"):
        decode_request(packed, b"gzip", 3)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_packed_body_that_was_cut_is_400(encoding):
    with pytest.raises(RequestError, match=encoding):
        decode_request(PACKERS[encoding](b"hello" * 100)[:-6], encoding.encode(), 1000)


@pytest.mark.parametrize("encoding", [b"br", b"gzip, zstd", b"x", b""])
def test_other_encodings_are_415(encoding):
    with pytest.raises(RequestError) as caught:
        decode_request(b"x", encoding, 10)
    assert caught.value.status == 415


# -- slow and silent clients -------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(engine, tmp_path):
    with GatewayProcess(
        engine, tmp_path / "s.sqlite3", header_timeout_s=1.0, idle_timeout_s=1.0, mode="passthrough"
    ) as gateway:
        yield gateway


def until_closed(connection):
    """What is received until the gateway closes."""
    connection.settimeout(60)
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD, HEAD + b"x-a: b"])
def test_headers_that_never_end_are_cut_off(impatient, sent):
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(sent)
        received = until_closed(connection)
        assert received == b""


def drip(connection):
    """True while the gateway takes one more header."""
    try:
        connection.sendall(b"x: y\r\n")
    except OSError:
        return False
    return True


def test_headers_that_drip_are_cut_off_too(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD)
        wait_for(lambda: not drip(connection))


def test_a_second_request_on_a_connection_is_timed_too(impatient, engine):
    body = b'{"messages": []}'
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: engine.served)
        connection.sendall(HEAD)
        received = until_closed(connection)
        assert received.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("sent", [b"", b"abc"])
def test_a_body_that_never_comes_is_408(impatient, engine, sent):
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: 10\r\n\r\n" + sent)
        received = until_closed(connection)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in received
        assert engine.received == []


def test_an_agent_that_takes_in_nothing_is_cut_off_and_the_upstream_with_it(impatient, engine):
    engine.answers.append(Answer(chunks=[b"x" * MB] * 64))
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
        wait_for(lambda: engine.aborted)


def test_headers_over_64_kib_are_431(impatient, engine):
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD)
        try:
            for _ in range(100):
                connection.sendall(b"x: " + b"y" * 4000 + b"\r\n")
        except OSError:
            pass
        received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 431 ") or received == b""  # a reset may overtake the answer
    assert engine.received == []


def test_a_long_answer_is_no_silence(impatient, engine):
    engine.answers.append(Answer(chunks=[b"a", b"b", b"c"], delay_s=1.5, chunk_delay_s=1.2))
    with socket.create_connection(("127.0.0.1", impatient.port)) as connection:
        connection.sendall(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\n{}")
        received = until_closed(connection)
        assert received.endswith(b"0\r\n\r\n")
