"""Connections that are slow, endless or many: each is cut off by a limit, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import threading
import time

import pytest

from fakes.engine import Answer
from fakes.gateway import CHAT, MESSAGES, RunningGateway, wait_for
from outrider.gateway.exchange import WATCHABLE, Exchange

LIMIT_S = 1.0
"""Each test sends what it begins with in one piece, right after it has connected: only a machine that stands still for
so long makes a test of something else."""


@pytest.fixture
def gateway(engine, tmp_path):
    limits = {"header_timeout_s": LIMIT_S, "idle_timeout_s": LIMIT_S}
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train", **limits) as gateway:
        yield gateway


def connect(gateway):
    raw = socket.create_connection(("127.0.0.1", gateway.port), timeout=60)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return raw


def answer(raw, last):
    """What comes, in one piece or several, until `last` is in it."""
    received = b""
    while last not in received:
        piece = raw.recv(65536)
        assert piece, received
        received += piece
    return received


def is_cut_off(raw, piece, pause_s=0.05, tries=600):
    """Send `piece` again and again until the other side has had enough."""
    raw.settimeout(0.001)
    for _ in range(tries):
        try:
            raw.sendall(piece)
        except TimeoutError:
            pass
        except OSError:
            return True
        with contextlib.suppress(TimeoutError):
            try:
                if raw.recv(65536) == b"":
                    return True
            except ConnectionError:
                return True
        time.sleep(pause_s)
    return False


def head(gateway, framing=b"content-length: 100000", path=None):
    path = path or f"/s/{gateway.open()}{CHAT}"
    return b"POST %s HTTP/1.1\r\nhost: gw\r\n%s\r\n\r\n" % (path.encode(), framing)


def test_headers_that_trickle_are_cut_off(gateway):
    with connect(gateway) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\n")
        assert is_cut_off(raw, b"x")


@pytest.mark.parametrize("framing", [b"content-length: 100000", b"transfer-encoding: chunked"])
def test_a_body_that_trickles_is_cut_off_though_it_is_never_idle(engine, gateway, framing):
    begun = head(gateway, framing)
    with connect(gateway) as raw:
        raw.sendall(begun)
        assert is_cut_off(raw, b"1\r\nx\r\n")
    assert gateway.client.stats()["refused"] == {"request_timeout": 1}
    assert engine.received == []


def test_a_body_that_is_refused_at_once_may_not_trickle_on_for_ever(gateway):
    begun = head(gateway, path="/nothing/here")
    with connect(gateway) as raw:
        raw.sendall(begun)
        assert raw.recv(65536).startswith(b"HTTP/1.1 404")
        assert is_cut_off(raw, b"x")


def test_empty_lines_after_an_answer_do_not_hold_a_connection(gateway, monkeypatch):
    monkeypatch.setattr(gateway.server._server.config, "timeout_keep_alive", LIMIT_S)
    with connect(gateway) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: gw\r\n\r\n")
        assert answer(raw, b"}").startswith(b"HTTP/1.1 200")
        raw.sendall(b"\r\n")
        assert raw.recv(65536) == b""


ENDLESS = {
    "headers": (b"content-length: 4\r\n", b"x-h: " + b"a" * 1000 + b"\r\n"),
    "one header": (b"x-h: ", b"a" * 1000),
    "trailers": (b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x-t: " + b"a" * 1000 + b"\r\n"),
    "one trailer": (b"transfer-encoding: chunked\r\n\r\n0\r\nx-t: ", b"a" * 1000),
    "a chunk's extension": (b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 1000),
    "chunks' extensions": (b"transfer-encoding: chunked\r\n\r\n", b"1;" + b"a" * 1000 + b"\r\nx\r\n"),
}


@pytest.mark.parametrize(("begins", "goes_on"), ENDLESS.values(), ids=ENDLESS.keys())
def test_what_never_ends_is_cut_off_before_it_fills_the_memory(engine, tmp_path, begins, goes_on):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway, connect(gateway) as raw:
        raw.sendall(f"POST /s/{gateway.open()}{CHAT} HTTP/1.1\r\nhost: gw\r\n".encode() + begins)
        assert is_cut_off(raw, goes_on, pause_s=0, tries=5000)
    assert engine.received == []


def test_small_chunks_are_no_attack(engine, tmp_path):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 60_000}]}).encode()
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway, connect(gateway) as raw:
        raw.sendall(head(gateway, b"transfer-encoding: chunked"))
        raw.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    assert len(engine.received[0].json["messages"][0]["content"]) == 60_000


def test_a_large_body_over_the_same_connection_twice(engine, tmp_path):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}).encode()
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway, connect(gateway) as raw:
        request = head(gateway, b"content-length: %d" % len(body)) + body
        for _ in range(2):
            raw.sendall(request)
            assert answer(raw, b'"total_tokens": 8}}').startswith(b"HTTP/1.1 200")


def test_an_answer_that_is_not_taken_in_is_cut_off_and_recorded_as_cancelled(engine, gateway):
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]}).encode() + b"\n\n"
    engine.answers.append(Answer(headers={"content-type": "text/event-stream"}, chunks=[event] * 400, end="hang"))
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    request = head(gateway, b"content-length: %d" % len(body)) + body
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", gateway.port))
        raw.sendall(request)
        assert gateway.call().state == "cancelled"
    wait_for(lambda: engine.aborted == 1)


def test_others_are_served_while_many_are_slow(engine, tmp_path):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train", header_timeout_s=2, idle_timeout_s=1) as gateway:
        begun = head(gateway)
        slow = [connect(gateway) for _ in range(100)]
        for number, raw in enumerate(slow):
            raw.sendall(begun if number % 2 else b"POST /s/x HTTP/1.1\r\nx: ")
        key = gateway.open("other")
        assert {gateway.chat(key).status for _ in range(20)} == {200}
        for raw in slow:
            assert ends(raw)


def ends(raw):
    """The other side closes, be it after an error."""
    with contextlib.closing(raw), contextlib.suppress(ConnectionError):
        while raw.recv(65536):
            pass
    return True


def test_a_gateway_that_runs_out_of_file_descriptors_recovers(engine, gateway):
    key = gateway.open()
    assert gateway.chat(key).status == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(socket.create_connection(("127.0.0.1", gateway.port), timeout=5))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for raw in taken:
            raw.close()
    assert taken
    wait_for(lambda: gateway.chat(key).status == 200)


def test_calls_beyond_the_limit_are_told_to_come_back_and_the_others_end_well(engine, tmp_path):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train", max_in_flight=2) as gateway:
        gate = threading.Event()
        engine.answers.extend(Answer(chunks=[b"", b"{}"], gate=gate) for _ in range(2))
        key = gateway.open()
        waiting = [gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES}) for _ in range(2)]
        wait_for(lambda: len(engine.received) == 2)
        got = gateway.chat(key)
        assert got.status == 503
        assert int(got.headers["retry-after"]) > 0
        gate.set()
        for raw in waiting:
            assert raw.recv(65536).startswith(b"HTTP/1.1 ")
            raw.close()
        assert gateway.chat(key).status == 200


def test_trailers_are_not_taken_for_headers(engine, tmp_path):
    body = json.dumps({"messages": MESSAGES}).encode()
    trailers = b"authorization: Bearer other\r\nx-trailer: 1\r\n"
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway, connect(gateway) as raw:
        for _ in range(2):
            raw.sendall(head(gateway, b"x-header: 1\r\ntransfer-encoding: chunked"))
            raw.sendall(b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers))
            assert answer(raw, b'"total_tokens": 8}}').startswith(b"HTTP/1.1 200")
    for received in engine.received:
        assert received.headers["x-header"] == "1"
        assert not {"authorization", "x-trailer"} & received.headers.keys()


@pytest.mark.parametrize("closed", [True, False])
async def test_an_answer_to_a_connection_that_was_cut_in_this_moment_is_no_failure(closed):
    class Cut:
        def __init__(self):
            self.closed = closed

    async def send(message):
        raise RuntimeError("unable to perform operation on a closed transport")

    scope = {"method": "POST", "raw_path": b"/", "query_string": b"", "headers": [], WATCHABLE: Cut()}
    exchange = Exchange(scope, None, send)
    if closed:
        await exchange.respond(200, [], b"{}")
    else:
        with pytest.raises(RuntimeError):
            await exchange.respond(200, [], b"{}")
