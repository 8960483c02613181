"""One connection to an upstream, which carries one call at a time: HTTP/1.1 over httptools."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

import httptools

from outrider.gateway.upstreams.errors import UpstreamError

if TYPE_CHECKING:
    from outrider.gateway.upstreams.upstream import UpstreamCall

# A host that vanished sends no reset. The kernel asks it after 30 s of silence and gives up after a minute, however
# long an answer may take; and no box on the way forgets a connection that only waits.
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
)
READ_SIZE = 1 << 16
JOIN_LIMIT = 1 << 16  # a body up to this size is sent in one write with its head


class UpstreamConnection(asyncio.Protocol):
    """Puts itself back into `idle` when an answer ended well, and closes in every other case.

    An answer ended well if the upstream sent what its framing promised, no byte more, and took the request whole.
    """

    def __init__(self, idle: list[UpstreamConnection]) -> None:
        self.reused = False
        self.received = False  # a byte of the present answer
        self.closed = False
        self.paused = False
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._call: UpstreamCall | None = None
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._framed = False  # the answer says itself where it ends
        self._unasked = False  # an answer began that nobody waits for

    def send(self, call: UpstreamCall, head: bytes, body: bytes) -> None:
        self._call = call
        self.received = False
        self._status, self._framed = 0, False  # those of the last answer: a loss would pass for the end of one like it
        if self._transport is None or self.closed or self._transport.is_closing():  # we may not have been told yet
            self._lost(call)
        elif len(body) <= JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def resume(self) -> None:
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        self.closed = True
        self._call = None
        if self in self._idle:
            self._idle.remove(self)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(transport, "max_size"):  # asyncio's own; what a slow agent is read ahead of comes in at once
            transport.max_size = READ_SIZE
        made: socket.socket | None = transport.get_extra_info("socket")
        if made is not None:
            for level, option, value in _KEEP_ALIVE:
                made.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self.close()  # an idle connection has nothing to say
            return
        self.received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            call.fail(UpstreamError("upstream_invalid", f"the upstream's answer is not valid HTTP: {error}"))
            self.close()
        except httptools.HttpParserUpgrade:
            call.fail(UpstreamError("upstream_invalid", "the upstream changes to another protocol, unasked"))
            self.close()
        if self._unasked:
            self.close()  # more than was promised: the next call would take the rest for its own answer
        call.progress()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        call, self._call = self._call, None
        if call is None:
            if self in self._idle:
                self._idle.remove(self)
        elif self._status and not self._framed and exc is None:
            call.completed()
            call.progress()
        else:
            self._lost(call)

    def _lost(self, call: UpstreamCall) -> None:
        if self.reused and not self.received:
            call.stale()
        else:
            call.fail(UpstreamError("upstream_cut", "the upstream closed the connection before its answer ended"))

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._unasked = self._call is None
        self._status = 0
        self._headers = []
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._headers.append((name, value))
        if name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower()):
            self._framed = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._call is None:
            return  # an interim answer; the real one follows
        self._status = status
        if self._call.answered(status, self._headers):
            self._call.completed()
            self.close()  # the parser would wait for the body that an answer to HEAD doesn't have

    def on_body(self, data: bytes) -> None:
        if self._call is not None and self._call.piece(data) and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        call = self._call
        if call is None or not self._status:
            return
        self._call = None
        call.completed()
        taken = self._transport is not None and not self._transport.get_write_buffer_size()
        if taken and not self.closed and self._parser.should_keep_alive():
            self.resume()
            self._idle.append(self)
        else:
            self.close()
