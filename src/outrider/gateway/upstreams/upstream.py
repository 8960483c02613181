"""The gateway's HTTP/1.1 client: a keep-alive pool over httptools, and nothing else.

A general client spends more CPU on one call than all the rest of the gateway. This one hands on the upstream's bytes
as they come (content encodings untouched), knows one upstream, and can be aborted at any moment. Everything that the
rest of the gateway sees of it is `Upstream.call`, `UpstreamCall` and `UpstreamError`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import re
import ssl
import time
from collections.abc import Callable, Sequence
from urllib.parse import SplitResult, urlsplit

from outrider.errors import ConfigError
from outrider.gateway.upstreams.connection import UpstreamConnection
from outrider.gateway.upstreams.errors import Code, Timeouts, UpstreamError, too_large

Headers = Sequence[tuple[bytes, bytes]]

# Of ours, and no sign that the upstream is ill: too many files for the process or the machine, no port, no memory.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
_NO_URL = re.compile(r"[^!-~]")  # HTTP's request line and Host header hold nothing else
_ROUTE = re.compile(r"/(chat/completions|completions|responses|messages)/?$")
HIGH_WATER = 1 << 16  # bytes read ahead of a slow agent before reading stops, and handled at once for a fast one


def _ignore(code: Code | None, status: int) -> None:
    pass


def read_base_url(text: str) -> SplitResult:
    """Raises `ConfigError` for what is no base URL, and for parts of one that would not be sent."""
    try:
        parts = urlsplit(text)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError as error:  # brackets, or a port that is no number or too large
        raise ConfigError(f"upstream: {text!r} is no URL: {error}.") from None
    if wrong or _NO_URL.search(text):
        raise ConfigError(f"upstream: {text!r} must look like http://host:port or https://host.")
    if "@" in parts.netloc:  # not quoted here: it holds a password
        raise ConfigError("upstream: user and password in the URL are not sent. Agents send their keys themselves.")
    if parts.query or parts.fragment:
        raise ConfigError(f"upstream: {text!r} must end with its path; what comes behind ? or # is not sent.")
    if route := _ROUTE.search(parts.path):
        raise ConfigError(f"upstream: {text!r} is not a base URL; leave out {route[0]!r}, which clients add.")
    return parts


class Upstream:
    """One base URL and its idle connections. No limit on their number: the engine knows best how much it takes.

    `ended` is told how each call ended: None and the status of an answer that came whole, else the error's code.
    """

    def __init__(
        self, base_url: str, *, timeouts: Timeouts, ended: Callable[[Code | None, int], None] = _ignore
    ) -> None:
        """Raises `ConfigError`."""
        parts = read_base_url(base_url)
        # Routes carry their own /v1, and people write base URLs both ways.
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        host = parts.netloc
        self.name = f"{parts.scheme}://{host}{prefix}"
        """Its URL."""
        self.timeouts = timeouts
        self.look_s = min(timeouts.first_byte_s, timeouts.chunk_s)
        """A limit may begin at any moment, so none is slept over."""
        self.in_flight = 0
        self.ended = ended
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = prefix.encode()
        self._host_header = host.encode()
        self._idle: list[UpstreamConnection] = []

    def call(
        self,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        within_s: float | None = None,
        max_bytes: float = math.inf,
    ) -> UpstreamCall:
        """Prepare one exchange; nothing is sent before `UpstreamCall.start`. `headers` hold no Host, no framing.

        It has to be over `within_s` seconds after its start, where the whole of `timeouts.total_s` is not left. It
        fails once the answer's body exceeds `max_bytes`.
        """
        lines = [method.encode(), b" ", self._prefix, target, b" HTTP/1.1\r\nhost: ", self._host_header, b"\r\n"]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if body or method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(b"\r\n")
        within_s = self.timeouts.total_s if within_s is None else within_s
        head, bodiless = b"".join(lines), method == "HEAD"
        return UpstreamCall(self, head, body, bodiless=bodiless, within_s=within_s, max_bytes=max_bytes)

    def close(self) -> None:
        for connection in list(self._idle):
            connection.close()

    def idle(self) -> UpstreamConnection | None:
        """A connection that is open and has nothing to do."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.reused = True
                return connection
        return None

    async def connect(self) -> UpstreamConnection:
        """Raises `UpstreamError`."""
        loop = asyncio.get_running_loop()
        limit_s = self.timeouts.connect_s
        try:
            async with asyncio.timeout(limit_s):
                _, made = await loop.create_connection(
                    lambda: UpstreamConnection(self._idle), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise UpstreamError(
                "upstream_connect_timeout", f"{self.name} did not accept a connection in {limit_s:g} s"
            ) from None
        except OSError as error:
            if error.errno in _EXHAUSTED:
                problem = f"the gateway has no socket left: {error}"
                raise UpstreamError("gateway_exhausted", problem, retry_after_s=1) from error
            raise UpstreamError("upstream_unreachable", f"cannot connect to {self.name}: {error}") from error
        return made


class UpstreamCall:
    """One request and its answer. Every waiting method raises `UpstreamError`."""

    __slots__ = (
        "__weakref__", "_answered", "_bodiless", "_body", "_complete", "_connecting", "_connection", "_deadline",
        "_error", "_head", "_heard", "_held", "_left", "_max_bytes", "_pieces", "_stale", "_started", "_timer",
        "_upstream", "_waiter", "_whole", "_within_s", "headers", "status",
    )  # fmt: skip

    def __init__(
        self, upstream: Upstream, head: bytes, body: bytes, *, bodiless: bool, within_s: float, max_bytes: float
    ) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self._upstream = upstream
        self._head = head
        self._body = body
        self._bodiless = bodiless
        self._max_bytes = self._left = max_bytes  # of the answer's body
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[UpstreamConnection] | None = None
        self._answered = False  # the headers are in
        self._complete = False
        self._started = False
        self._stale = False
        self._error: tuple[Code, str, int] | None = None
        self._whole = False  # nobody wants pieces: wake up at the end only
        self._pieces: list[bytes] = []
        self._held = 0
        self._waiter: asyncio.Future[None] | None = None
        self._within_s = within_s
        self._deadline = 0.0
        self._heard = math.inf  # when it was sent, or the last byte came
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Send the request; returns when status and headers are there."""
        self._check()
        self._started = True
        self._upstream.in_flight += 1
        self._deadline = time.monotonic() + self._within_s
        first_look_s = min(self._within_s, self._upstream.look_s)
        self._timer = asyncio.get_running_loop().call_later(first_look_s, self._look)
        connection = self._upstream.idle() or await self._connect()
        while True:
            self._heard = time.monotonic()
            self._connection = connection
            connection.send(self, self._head, self._body)
            while not self._answered and not self._stale:
                await self._wait()
            if self._answered:
                return
            self._stale = False
            connection = await self._connect()

    async def _connect(self) -> UpstreamConnection:
        self._heard = math.inf  # nothing to hear yet
        self._connecting = asyncio.create_task(self._upstream.connect())
        try:
            connection = await self._connecting
        except asyncio.CancelledError:
            self._connecting.cancel()
            self._check()  # given up by `abort` or the time limit
            self.abort()
            raise
        except UpstreamError as error:
            self.fail(error)
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
        """Close the connection at once; a waiting method raises ``aborted``. Harmless at the end."""
        if not self._complete:
            self.fail(UpstreamError("aborted", message))

    def fail(self, error: UpstreamError) -> None:
        if self._complete or self._error is not None:
            return
        # Not the error itself: its traceback leads back here, and bodies would wait for the garbage collector.
        self._error = (error.code, str(error), error.retry_after_s)
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._over(error.code)
        self._wake()

    # -- called by the connection ----------------------------------------------------------------------------------

    def answered(self, status: int, headers: list[tuple[bytes, bytes]]) -> bool:
        """Status and headers are in; returns whether that is all."""
        self.status = status
        self.headers = headers
        self._answered = True
        self._body = b""  # it is not sent again
        self._heard = time.monotonic()
        return self._bodiless

    def piece(self, data: bytes) -> bool:
        """A part of the body; returns whether reading should stop for a while."""
        self._left -= len(data)
        if self._left < 0:
            self.fail(too_large(self._max_bytes))
            return False
        self._pieces.append(data)
        self._held += len(data)
        self._heard = time.monotonic()
        return self._held > HIGH_WATER and not self._whole

    def completed(self) -> None:
        self._complete = True
        self._connection = None
        self._over(None)

    def stale(self) -> None:
        """The server closed an idle connection just as we used it. Before the first byte of an answer that says nothing
        about the request, so it is sent once more, over a connection of its own."""
        self._stale = True
        self._connection = None
        self._wake()

    def progress(self) -> None:
        """Wake whoever waits, if there is something for them."""
        if not self._whole or self._complete:
            self._wake()

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait for news. Raises only where there are none to take in any more: what came before an error counts."""
        self._check()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise

    def _check(self) -> None:
        if self._error is not None:
            code, message, retry_after_s = self._error
            raise UpstreamError(code, message, retry_after_s=retry_after_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _over(self, code: Code | None) -> None:
        """Once for each call that was started."""
        if self._timer is not None:
            self._timer.cancel()
        if self._started:
            self._upstream.in_flight -= 1
            self._upstream.ended(code, self.status)

    def _look(self) -> None:
        """Fail if a limit is reached; else look again when that may be. So one timer serves them all, and no chunk
        moves it."""
        limits, now = self._upstream.timeouts, time.monotonic()
        if self._connection is not None and self._connection.paused:
            self._heard = now  # it is we who don't listen
        limit_s = limits.chunk_s if self._answered else limits.first_byte_s
        name = self._upstream.name
        if now >= self._deadline:
            self.fail(UpstreamError("upstream_timeout", f"{name} gave no whole answer in {limits.total_s:g} s"))
        elif now < self._heard + limit_s:
            due = self._heard + limit_s if self._answered else now + self._upstream.look_s
            next_look = min(self._deadline, self._heard + limit_s, due)
            self._timer = asyncio.get_running_loop().call_later(next_look - now, self._look)
        elif self._answered:
            self.fail(UpstreamError("upstream_chunk_timeout", f"{name} stopped in its answer for {limit_s:g} s"))
        else:
            self.fail(UpstreamError("upstream_first_byte_timeout", f"{name} began no answer in {limit_s:g} s"))
