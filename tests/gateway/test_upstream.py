"""The HTTP client against hand-written bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import weakref

import pytest

from fakes.byte_server import OK, Server, fetch
from outrider.errors import ConfigError
from outrider.gateway.upstreams.errors import Timeouts, UpstreamError
from outrider.gateway.upstreams.upstream import Upstream


async def test_a_request_is_sent_as_given():
    async with Server(OK) as server:
        assert await fetch(server) == (200, b"ok")
        head, body = server.requests[0]
        assert head.startswith(b"POST /v1/x?q=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-a: b\r\ncontent-length: 1\r\n\r\n" in head
        assert body == b"x"


async def test_connections_are_used_again():
    async with Server(OK, OK, OK) as server:
        for _ in range(3):
            await fetch(server)
        assert server.connections == 1


async def test_a_host_that_vanished_is_noticed_by_the_kernel():
    async with Server(OK) as server:
        await fetch(server)
        made = server.upstream.idle()._transport.get_extra_info("socket")
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


async def test_a_closed_idle_connection_is_replaced_in_silence():
    async with Server([*OK, "close"], OK) as server:
        await fetch(server)
        await asyncio.sleep(0.1)
        assert await fetch(server) == (200, b"ok")
        assert server.connections == 2


async def test_a_connection_closed_under_a_request_is_tried_once_more_and_no_more():
    async with Server(OK, ["close"], OK) as server:
        await fetch(server)
        assert await fetch(server) == (200, b"ok")
        assert server.connections == 2
    async with Server(["close"], OK) as server:
        with pytest.raises(UpstreamError, match="closed the connection"):
            await fetch(server)
        assert len(server.requests) == 1


async def test_a_connection_closed_under_the_request_after_one_without_a_body_is_no_answer():
    async with Server([b"HTTP/1.1 204 No Content\r\n\r\n"], ["close"], OK) as server, asyncio.timeout(60):
        assert await fetch(server) == (204, b"")
        assert await fetch(server) == (200, b"ok")
        assert server.connections == 2


async def test_after_the_first_byte_nothing_is_tried_again():
    async with Server(OK, [b"HTTP/1.1 200", "close"], OK) as server:
        await fetch(server)
        with pytest.raises(UpstreamError):
            await fetch(server)
        assert len(server.requests) == 2


FRAMINGS = {
    "chunked": [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n",
        0.02,
        b"4;x=y\r\nello\r\n0\r\n\r\n",
    ],
    "trailers": [b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n"],
    "length": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", 0.02, b"llo"],
    "one byte at a time": [bytes([b]) for b in b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"],
    "until the end": [b"HTTP/1.1 200 OK\r\n\r\nhel", 0.02, b"lo", "close"],
    "HTTP/1.0": [b"HTTP/1.0 200 OK\r\n\r\nhello", "close"],
    "after 100 and 103": [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        0.02,
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
    "told to close": [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello", "close"],
}


@pytest.mark.parametrize("script", FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_every_framing_is_read_whole_and_the_next_call_works(script):
    async with Server(script, OK) as server:
        assert await fetch(server) == (200, b"hello")
        assert await fetch(server) == (200, b"ok")


CUTS = {
    "before a byte": ["close"],
    "in the head": [b"HTTP/1.1 200 OK\r\nContent-", "close"],
    "in a length": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", "close"],
    "in a chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", "close"],
    "before the last chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "close"],
    "no HTTP": [b"hello there\r\n\r\n", "close"],
    "a chunk that is no chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhe\r\n", "close"],
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhel", "close"],
    "a length that is no number": [b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nhello", "close"],
}
INVALID = [CUTS[name] for name in ("no HTTP", "a chunk that is no chunk", "two lengths", "a length that is no number")]


@pytest.mark.parametrize("script", CUTS.values(), ids=CUTS.keys())
async def test_a_cut_answer_is_an_error(script):
    code = "upstream_invalid" if script in INVALID else "upstream_cut"
    async with Server(script) as server:
        with pytest.raises(UpstreamError) as caught:
            await fetch(server)
        assert caught.value.code == code
        assert caught.value.status == 502


async def test_pieces_come_as_they_are_sent():
    script = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", 0.1, b"1\r\nb\r\n", 0.1, b"0\r\n\r\n"]
    async with Server(script) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        assert [await call.chunk(), await call.chunk(), await call.chunk()] == [b"a", b"b", b""]


async def test_more_bytes_than_promised_are_nobodys_answer():
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"
    for script in ([OK[0] + b"more"], [OK[0] + extra], [OK[0] + extra[:30]]):
        async with Server([*script, 0.1], OK) as server:
            assert await fetch(server) == (200, b"ok")
            assert await fetch(server) == (200, b"ok")
            assert server.connections == 2


async def test_a_connection_that_has_not_taken_the_request_whole_is_not_used_again():
    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asked.wait()
        writer.close()

    asked = asyncio.Event()
    server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1024)
    upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeouts=Timeouts(total_s=20))
    call = upstream.call("POST", b"/", [], b"x" * (32 << 20))
    await call.start()
    assert (call.status, await call.read()) == (413, b"no")
    assert upstream.idle() is None
    asked.set()
    server.close()
    await asyncio.sleep(0.05)


async def test_a_failed_call_is_gone_without_the_garbage_collector():
    gc.disable()
    try:
        for script in (["close"], [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", "close"]):
            async with Server(script) as server:
                call = server.upstream.call("POST", b"/", [], b"x")
                left = weakref.ref(call)
                with contextlib.suppress(UpstreamError):
                    await call.start()
                    await call.read()
                del call
                async with asyncio.timeout(30):
                    while left() is not None:
                        await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_what_ended_is_told_once():
    ended = []
    async with Server(OK, ["close"], ["close"], [b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"]) as server:
        server.upstream.ended = lambda code, status: ended.append((code, status))
        await fetch(server)
        with pytest.raises(UpstreamError):  # sent twice: over the idle connection and over one of its own
            await fetch(server)
        server.upstream.call("POST", b"/", [], b"").abort()  # never sent
        assert await fetch(server) == (503, b"")
        assert ended == [(None, 200), ("upstream_cut", 0), (None, 503)]
        assert server.upstream.in_flight == 0


async def test_an_abort_closes_at_once_and_wakes_the_waiter():
    async with Server([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", 1.0, b"x" * 7]) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        assert await call.chunk() == b"ab"
        waiting = asyncio.create_task(call.chunk())
        await asyncio.sleep(0.01)
        call.abort()
        with pytest.raises(UpstreamError) as caught:
            await waiting
        assert caught.value.code == "aborted"


async def test_an_abort_before_the_start_sends_nothing():
    async with Server(OK) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        call.abort()
        with pytest.raises(UpstreamError):
            await call.start()
        assert server.requests == []


async def test_an_answer_to_HEAD_has_no_body():
    async with Server([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"], OK) as server:
        assert await fetch(server, "HEAD", b"") == (200, b"")
        assert await fetch(server) == (200, b"ok")


async def test_no_socket_left_is_our_own_trouble():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended = []
    async with Server(OK, OK) as server:
        server.upstream.ended = lambda code, status: ended.append(code)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(UpstreamError, match="no socket left") as caught:
                await fetch(server)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (caught.value.code, caught.value.status, caught.value.retry_after_s) == ("gateway_exhausted", 503, 1)
        assert await fetch(server) == (200, b"ok")
        assert ended == ["gateway_exhausted", None]


async def test_nobody_there_is_a_refusal():
    with pytest.raises(UpstreamError, match="cannot connect") as caught:
        await Upstream("http://127.0.0.1:1", timeouts=Timeouts()).call("POST", b"/", [], b"").start()
    assert caught.value.code == "upstream_unreachable"


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://", "http:///v1"])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="upstream"):
        Upstream(url, timeouts=Timeouts())


def test_the_name_of_an_upstream_is_its_url_without_v1():
    assert Upstream("https://a.b:8/x/v1/", timeouts=Timeouts()).name == "https://a.b:8/x"
