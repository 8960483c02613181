"""An agent's connection with time limits: uvicorn's own has one for idle connections between two requests, and no more.

A client that sends its headers byte by byte, or takes in no answer, is cut off; so it holds nothing for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 1 << 16
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


class Connection(HttpToolsProtocol):
    """Aborted where headers take too long, from the first byte of a request or from the start, and where an answer is
    not taken in."""

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
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._head_timer = self.loop.call_later(self.HEADER_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.HEADER_TIMEOUT_S, self.transport.abort)
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

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

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
