"""An agent's connection with limits: uvicorn's own has one for idle connections between two requests, and no more.

A client that sends its headers byte by byte, takes in no answer, or goes on sending a body that was refused is cut off;
so it holds nothing for ever. Nor does it fill the memory with headers, trailers or chunk extensions without end.

No other protocol is spoken here, so that a request which asks for one (as Java's client does, for HTTP/2) is answered
as if it had not.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from outrider.gateway.exchange import WATCHABLE

MAX_HEAD_BYTES = 1 << 16
# The kernel would take megabytes for an agent that does not read, and we as much of its answer from the upstream.
UNSENT_BYTES = 1 << 18
FRAMING_PER_BODY_BYTE = 16  # a chunk of one byte is framed by five more
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 28\r\nconnection: close\r\n\r\nThe headers are over 64 KiB."
)


def connection_class(*, header_timeout_s: float, idle_timeout_s: float) -> type[asyncio.Protocol]:
    """`Connection` with these limits, for uvicorn, which makes its connections itself."""

    class Limited(Connection):
        HEADER_TIMEOUT_S = header_timeout_s
        IDLE_TIMEOUT_S = idle_timeout_s

    return Limited


class _Parser(httptools.HttpRequestParser):
    """Reads a request that asks for another protocol once more, as a plain one.

    httptools lets it end with its headers, and would take its body for the next request.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("there is no tunnel here") from None
                data = self._head() + data[upgrade.args[0] :]

    def _head(self) -> bytes:
        """That of the present request, without `Upgrade`."""
        connection = self._connection
        lines = [b"%b %b HTTP/%b\r\n" % (self.get_method(), connection.url, self.get_http_version().encode())]
        lines += [b"%b: %b\r\n" % header for header in connection.headers if header[0] != b"upgrade"]
        connection.upgrades = [header for header in connection.headers if header[0] == b"upgrade"]
        return b"".join(lines) + b"\r\n"


class Connection(HttpToolsProtocol):
    """Aborted where headers take too long, from the first byte of a request or from the start, where an answer is not
    taken in, and where the rest of a request that has its answer does not end."""

    HEADER_TIMEOUT_S = 30.0
    IDLE_TIMEOUT_S = 60.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = _Parser(self)
        self.upgrades: list[tuple[bytes, bytes]] = []
        """Headers that were kept from the parser."""
        self._in_message = False
        self._framing_bytes = 0  # of the present request: all but its body
        self._body_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._lost = False
        self._on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` once when the connection is lost, at once if it is; see `exchange.Watchable`."""
        if not self.closed:
            self.flow.resume_reading()  # a large body may have stopped it, and then nobody sees the end
        if self._lost:
            self.loop.call_soon(on_lost)
        else:
            self._on_lost = on_lost

    def unwatch(self) -> None:
        self._on_lost = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        made: socket.socket | None = transport.get_extra_info("socket")
        if made is not None and made.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        self._head_timer = self.loop.call_later(self.HEADER_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_rest_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._lost = True
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        self._framing_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._framing_bytes > MAX_HEAD_BYTES + FRAMING_PER_BODY_BYTE * self._body_bytes:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            else:
                self.transport.abort()  # in the middle of an answer there is nothing to say
        elif not self._in_message and self._answered and self.timeout_keep_alive_task is None:
            # Empty lines between two requests: they end the wait for the next one, but are not its beginning.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _answered(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and not self.pipeline

    @property
    def closed(self) -> bool:
        return bool(self.transport.is_closing())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.HEADER_TIMEOUT_S, self.transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_timer is not None:  # else it is a trailer, which must not be taken for a header (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it comes again, see `_Parser`
        self.headers += self.upgrades
        self.upgrades = []
        self._stop_head_timer()
        cast(dict[str, Any], self.scope)[WATCHABLE] = self
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._stop_rest_timer()
        self._framing_bytes = self._body_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and self._rest_timer is None:
            self._rest_timer = self.loop.call_later(self.IDLE_TIMEOUT_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.IDLE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_rest_timer(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
