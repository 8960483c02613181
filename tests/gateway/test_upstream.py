"""The HTTP client against hand-written bytes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from outrider.errors import ConfigError
from outrider.gateway.upstream import HIGH_WATER, Upstream, UpstreamError


class Server:
    """Answers each request with the next script: bytes to write, a number of seconds to wait, or "close"."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.requests = []
        self.connections = 0
        self.lost = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.upstream = Upstream(f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}", timeout_s=20)
        return self

    async def __aexit__(self, *error):
        self.upstream.close()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.sleep(0.05)

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(length[0].split()[1])) if length else b""
                self.requests.append((head, body))
                for step in self.scripts.pop(0):
                    if step == "close":
                        return
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        writer.write(step)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
        finally:
            writer.close()


OK = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]


async def fetch(server, method="POST", body=b"x"):
    call = server.upstream.call(method, b"/v1/x?q=1", [(b"x-a", b"b")], body)
    await call.start()
    return call.status, await call.read()


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
}


@pytest.mark.parametrize("script", CUTS.values(), ids=CUTS.keys())
async def test_a_cut_answer_is_an_error(script):
    async with Server(script) as server:
        with pytest.raises(UpstreamError) as caught:
            await fetch(server)
        assert caught.value.kind == "cut"
        assert caught.value.status == 502


async def test_pieces_come_as_they_are_sent():
    script = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", 0.1, b"1\r\nb\r\n", 0.1, b"0\r\n\r\n"]
    async with Server(script) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        assert [await call.chunk(), await call.chunk(), await call.chunk()] == [b"a", b"b", b""]


async def test_no_answer_in_time_is_504():
    async with Server([5.0]) as server:
        server.upstream.timeout_s = 0.1
        with pytest.raises(UpstreamError) as caught:
            await fetch(server)
        assert (caught.value.kind, caught.value.status) == ("timeout", 504)


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
        assert caught.value.kind == "aborted"


async def test_an_abort_before_the_start_sends_nothing():
    async with Server(OK) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        call.abort()
        with pytest.raises(UpstreamError):
            await call.start()
        assert server.requests == []


async def test_a_slow_reader_stops_the_upstream():
    size = 64 << 20
    async with Server([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size, b"x" * size]) as server:
        call = server.upstream.call("POST", b"/", [], b"")
        await call.start()
        await asyncio.sleep(0.3)
        first = await call.chunk()
        assert HIGH_WATER < len(first) < size / 4
        total = len(first)
        while data := await call.chunk():
            total += len(data)
        assert total == size


async def test_an_answer_to_HEAD_has_no_body():
    async with Server([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"], OK) as server:
        assert await fetch(server, "HEAD", b"") == (200, b"")
        assert await fetch(server) == (200, b"ok")


async def test_nobody_there_is_a_refusal():
    with pytest.raises(UpstreamError, match="cannot connect") as caught:
        await Upstream("http://127.0.0.1:1", timeout_s=5).call("POST", b"/", [], b"").start()
    assert caught.value.kind == "refused"


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://", "http:///v1"])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="upstream"):
        Upstream(url, timeout_s=1)


async def test_a_connect_that_hangs_is_given_up_at_once():
    with socket.socket() as deaf, socket.socket() as first:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        first.connect(("127.0.0.1", port))  # fills the queue, so the kernel answers no further one
        upstream = Upstream(f"http://127.0.0.1:{port}", timeout_s=60)
        call = upstream.call("POST", b"/v1/x", [], b"x")
        waiting = asyncio.create_task(call.start())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        call.abort()
        with pytest.raises(UpstreamError, match="given up"):
            await asyncio.wait_for(waiting, 2)
        slow = Upstream(f"http://127.0.0.1:{port}", timeout_s=0.1).call("POST", b"/v1/x", [], b"x")
        with pytest.raises(UpstreamError, match="no answer in"):
            await asyncio.wait_for(slow.start(), 5)
