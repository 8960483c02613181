"""How long the HTTP client waits for an upstream, and how much it takes in."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fakes.byte_server import Server, fetch
from fakes.clock import LeapingClock
from outrider.gateway.upstreams import upstream
from outrider.gateway.upstreams.errors import Timeouts, UpstreamError
from outrider.gateway.upstreams.upstream import HIGH_WATER, Upstream


async def test_no_answer_in_time_is_504():
    async with Server([5.0], timeouts=Timeouts(total_s=0.1)) as server:
        with pytest.raises(UpstreamError, match=r"no whole answer in 0\.1 s") as caught:
            await fetch(server)
        assert (caught.value.code, caught.value.status) == ("upstream_timeout", 504)
        assert server.upstream.in_flight == 0


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("limits", "script", "code"),
    [
        ({"first_byte_s": 0.1}, [5.0], "upstream_first_byte_timeout"),
        ({"chunk_s": 0.1}, [STREAM, 5.0], "upstream_chunk_timeout"),
        ({"chunk_s": 0.1}, [STREAM, b"1\r\na\r\n", 5.0], "upstream_chunk_timeout"),
        ({"total_s": 0.5}, [STREAM, *[b"1\r\na\r\n", 0.2] * 9], "upstream_timeout"),
    ],
    ids=["first byte", "after the head", "after a chunk", "in all"],
)
async def test_each_limit_has_a_code_of_its_own(limits, script, code):
    async with Server(script, timeouts=Timeouts(**limits)) as server:
        with pytest.raises(UpstreamError) as caught:
            await fetch(server)
        assert (caught.value.code, caught.value.status) == (code, 504)
        assert server.upstream.in_flight == 0


@pytest.fixture
async def clock(monkeypatch):
    """What the client and the event loop of the test go by."""
    clock = LeapingClock()
    monkeypatch.setattr(upstream, "time", clock)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock.monotonic)
    return clock


async def test_a_limit_that_is_not_reached_does_no_harm(clock):
    limits = Timeouts(first_byte_s=900.0, chunk_s=900.0, total_s=86_400.0)

    def leap():
        clock.leap(600)

    script = [leap, STREAM, *[b"1\r\na\r\n", 0.01, leap] * 6, b"0\r\n\r\n"]  # longer in all than any of the two
    async with Server(script, timeouts=limits) as server:
        assert await fetch(server) == (200, b"a" * 6)


async def stops_reading(call):
    async with asyncio.timeout(60):
        while not call._connection.paused:
            await asyncio.sleep(0.01)


async def test_a_reader_that_is_slow_itself_does_not_time_the_upstream_out(clock):
    size = 8 << 20
    script = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size]
    async with Server(script, timeouts=Timeouts(chunk_s=900.0, total_s=86_400.0)) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        await stops_reading(call)
        for _ in range(4):
            clock.leap(600)
            await asyncio.sleep(0.01)
        total = 0
        while data := await call.chunk():
            total += len(data)
        assert total == size


async def test_a_slow_reader_stops_the_upstream():
    size = 64 << 20
    async with Server([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size]) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        await stops_reading(call)
        await asyncio.sleep(0.1)  # in which the upstream would send on
        first = await call.chunk()
        assert HIGH_WATER < len(first) < size / 4
        total = len(first)
        while data := await call.chunk():
            total += len(data)
        assert total == size


async def test_a_connect_that_hangs_is_given_up_at_once():
    with socket.socket() as deaf, socket.socket() as first:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        first.connect(("127.0.0.1", port))  # fills the queue, so the kernel answers no further one
        patient = Upstream(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=3600))
        call = patient.call("POST", b"/v1/x", [], b"x")
        waiting = asyncio.create_task(call.start())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        call.abort()
        with pytest.raises(UpstreamError, match="given up"):
            await asyncio.wait_for(waiting, 30)
        slow = patient.call("POST", b"/v1/x", [], b"x", within_s=0.1)
        with pytest.raises(UpstreamError) as caught:
            await asyncio.wait_for(slow.start(), 30)
        assert caught.value.code == "upstream_timeout"
        assert patient.in_flight == 0
        hasty = Upstream(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=0.5))
        with pytest.raises(UpstreamError, match=r"did not accept a connection in 0\.5 s") as caught:
            await asyncio.wait_for(hasty.call("POST", b"/v1/x", [], b"x").start(), 30)
        assert (caught.value.code, caught.value.status) == ("upstream_connect_timeout", 504)
        assert hasty.in_flight == 0
