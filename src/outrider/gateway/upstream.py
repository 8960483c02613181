"""The gateway's HTTP/1.1 client: a keep-alive pool over httptools, and nothing else.

A general client spends more CPU on one call than all the rest of the gateway. This one hands on the upstream's bytes
as they come (content encodings untouched), knows one upstream, and can be aborted at any moment. Everything that the
rest of the gateway sees of it is `Upstream.call`, `UpstreamCall` and `UpstreamError`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

from outrider.errors import ConfigError

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_TIMEOUT_S = 10.0
HIGH_WATER = 1 << 20  # bytes read ahead of a slow agent before reading stops
JOIN_LIMIT = 1 << 16  # a body up to this size is sent in one write with its head


class UpstreamError(Exception):
    """The upstream gave no whole answer. `status` is what an agent should get, if it got none yet."""

    def __init__(self, kind: Literal["refused", "cut", "timeout", "aborted"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = 504 if kind == "timeout" else 502


class Upstream:
    """One base URL and its idle connections. No limit on their number: the engine knows best how much it takes."""

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"upstream: {base_url!r} must look like http://host:port or https://host.")
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        # Routes carry their own /v1, and people write base URLs both ways.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1").encode()
        self._host_header = parts.netloc.rpartition("@")[2].encode()
        self._idle: list[_Connection] = []

    def call(self, method: str, target: bytes, headers: Headers, body: bytes) -> UpstreamCall:
        """Prepare one exchange; nothing is sent before `UpstreamCall.start`. `headers` hold no Host, no framing."""
        lines = [method.encode(), b" ", self._prefix, target, b" HTTP/1.1\r\nhost: ", self._host_header, b"\r\n"]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(b"\r\n")
        return UpstreamCall(self, b"".join(lines), body, bodiless=method == "HEAD")

    def close(self) -> None:
        for connection in list(self._idle):
            connection.close()

    def idle(self) -> _Connection | None:
        """A connection that is open and has nothing to do."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.reused = True
                return connection
        return None

    async def connect(self) -> _Connection:
        """Raises `UpstreamError`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await loop.create_connection(
                    lambda: _Connection(self._idle), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise UpstreamError(
                "refused", f"{self.base_url} did not accept a connection within {CONNECT_TIMEOUT_S:g} s"
            ) from None
        except OSError as error:
            raise UpstreamError("refused", f"cannot connect to {self.base_url}: {error}") from error
        return made


class UpstreamCall:
    """One request and its answer. Every waiting method raises `UpstreamError`."""

    def __init__(self, upstream: Upstream, head: bytes, body: bytes, *, bodiless: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self._upstream = upstream
        self._head = head
        self._body = body
        self._bodiless = bodiless
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[_Connection] | None = None
        self._answered = False  # the headers are in
        self._complete = False
        self._error: UpstreamError | None = None
        self._whole = False  # nobody wants pieces: wake up at the end only
        self._pieces: list[bytes] = []
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Send the request; returns when status and headers are there."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._upstream.timeout_s, self._expire)
        fresh = False
        while not self._answered:
            self._check()
            connection = (None if fresh else self._upstream.idle()) or await self._connect()
            self._connection = connection
            connection.send(self, self._head, self._body)
            try:
                while not self._answered:
                    await self._wait()
            except UpstreamError as error:
                # The server may close an idle connection just as we use it. Before the first byte of an answer
                # that says nothing about the request, so it is sent once more, over a connection of its own.
                if error.kind != "cut" or not connection.reused or connection.received:
                    raise
                self._error = None
                fresh = True

    async def _connect(self) -> _Connection:
        self._connecting = asyncio.create_task(self._upstream.connect())
        try:
            connection = await self._connecting
        except asyncio.CancelledError:
            self._connecting.cancel()
            self._check()  # given up by `abort` or the time limit
            raise
        finally:
            self._connecting = None
        if self._error is not None:  # in the same moment as it was made
            connection.close()
            self._check()
        return connection

    async def chunk(self) -> bytes:
        """What has come since the last call; empty at the end."""
        while not self._pieces:
            if self._complete:
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._held > HIGH_WATER and self._connection is not None:
            self._connection.resume()
        self._held = 0
        return data

    async def read(self) -> bytes:
        """The rest of the body."""
        self._whole = True
        if self._connection is not None:
            self._connection.resume()
        while not self._complete:
            await self._wait()
        return self.partial()

    def partial(self) -> bytes:
        """What has come and was not taken yet, also after an error."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    def abort(self, message: str = "the call was given up") -> None:
        """Close the connection at once; a waiting method raises with kind ``aborted``. Harmless at the end."""
        self.fail(UpstreamError("aborted", message))

    def fail(self, error: UpstreamError) -> None:
        if self._complete or self._error is not None:
            return
        self._error = error
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._wake()

    # -- called by the connection ----------------------------------------------------------------------------------

    def answered(self, status: int, headers: list[tuple[bytes, bytes]]) -> bool:
        """Status and headers are in; returns whether that is all."""
        self.status = status
        self.headers = headers
        self._answered = True
        return self._bodiless

    def piece(self, data: bytes) -> bool:
        """A part of the body; returns whether reading should stop for a while."""
        self._pieces.append(data)
        self._held += len(data)
        return self._held > HIGH_WATER and not self._whole

    def completed(self) -> None:
        self._complete = True
        self._connection = None
        if self._timer is not None:
            self._timer.cancel()

    def progress(self) -> None:
        """Wake whoever waits, if there is something for them."""
        if not self._whole or self._complete:
            self._wake()

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        self._check()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            if self._timer is not None:
                self._timer.cancel()
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self.fail(
            UpstreamError("timeout", f"{self._upstream.base_url} gave no answer in {self._upstream.timeout_s:g} s")
        )


class _Connection(asyncio.Protocol):
    """A connection that carries one call at a time. Puts itself back into `idle` when an answer ended well."""

    def __init__(self, idle: list[_Connection]) -> None:
        self.reused = False
        self.received = False  # a byte of the present answer
        self.closed = False
        self._idle = idle
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._call: UpstreamCall | None = None
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._framed = False  # the answer says itself where it ends
        self._paused = False

    def send(self, call: UpstreamCall, head: bytes, body: bytes) -> None:
        self._call = call
        self.received = False
        if self._transport is None or self.closed:
            call.fail(UpstreamError("cut", "the upstream closed the connection"))
        elif len(body) <= JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
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

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self.close()  # an idle connection has nothing to say
            return
        self.received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            call.fail(UpstreamError("cut", f"the upstream's answer is not valid HTTP: {error}"))
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
            call.fail(UpstreamError("cut", "the upstream closed the connection before its answer ended"))

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
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
        if self._call is not None and self._call.piece(data) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        call = self._call
        if call is None or not self._status:
            return
        self._call = None
        call.completed()
        if self._parser.should_keep_alive() and not self.closed:
            self.resume()
            self._idle.append(self)
        else:
            self.close()
