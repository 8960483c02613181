"""The agent's side of one HTTP exchange: a thin cover over raw ASGI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, Protocol

from outrider.errors import RequestError
from outrider.gateway.encoding import Packer, decode_request, packer_for
from outrider.gateway.telemetry.note import Note

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

SLOWEST_BODY = 1024  # bytes a second, on the whole; an agent that sends less holds a connection for nothing
PACKED_FROM = 1024  # bytes; a shorter answer gains nothing
CALL_HEADER = b"x-outrider-call"  # the id of a call, as in the store and in the log
JSON_TYPE = (b"content-type", b"application/json")
# Of one connection only (RFC 9110, section 7.6.1), so not ours to pass on.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


WATCHABLE = "outrider.connection"
"""The server's key in the scope for its connection, if it can be watched."""


class Watchable(Protocol):
    """A connection that tells when it is lost. Without one a task has to wait for it, which costs each call more."""

    @property
    def closed(self) -> bool: ...

    def watch(self, on_lost: Callable[[], None]) -> None: ...

    def unwatch(self) -> None: ...


class ClientGone(Exception):
    """The agent closed its connection before its request was complete."""


class Exchange:
    """One request, and the answer to it. Sending to an agent that has gone is harmless."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, idle_timeout_s: float = 60.0) -> None:
        self.method: str = scope["method"]
        self.path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = scope["headers"]
        self.started = False
        """The status line was sent, so that an error can't be a status any more."""
        self.gone = False
        self.status = 0
        """Of the answer, once it has begun."""
        self.note: Note | None = None
        """What a model call tells of itself."""
        self.take_room: Callable[[int, int], None] | None = None
        """Asked about each part of a long body: its size, and that of the body by now. May raise `RequestError`."""
        self.room = 0
        """Bytes that were taken so."""
        self._idle_timeout_s = idle_timeout_s
        self._receive = receive
        self._send = send
        self._packer: Packer | None = None
        self._on_gone: Callable[[], object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._connection: Watchable | None = scope.get(WATCHABLE)

    def header(self, name: bytes) -> bytes | None:
        """Value of a header by its lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self, limit: int) -> bytes:
        """The whole body as sent. Raises `RequestError` with status 413 or 408, and `ClientGone`."""
        declared = self.header(b"content-length")
        if declared is not None and int(declared) > limit:
            raise _too_large(limit)
        began = time.monotonic()
        message = await self._next_message(began, 0)
        data: bytes = message.get("body", b"")
        if not message.get("more_body", False) and message["type"] == "http.request" and len(data) <= limit:
            return data
        parts, size = [data], len(data)
        while message.get("more_body", False) and size <= limit:
            message = await self._next_message(began, size)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if self.take_room is not None:
                self.take_room(len(parts[-1]), size)
                self.room += len(parts[-1])
        if message["type"] == "http.disconnect":
            raise ClientGone
        if size > limit:
            raise _too_large(limit)
        return b"".join(parts)

    async def _next_message(self, began: float, size: int) -> Message:
        """The next part of a body that `began` then and has this size by now."""
        left_s = self._idle_timeout_s + size / SLOWEST_BODY - (time.monotonic() - began)
        try:
            async with asyncio.timeout(min(self._idle_timeout_s, left_s)):
                return await self._received()
        except TimeoutError:
            raise RequestError("The request body did not arrive.", status=408, code="request_timeout") from None

    async def _received(self) -> Message:
        try:
            return await self._receive()
        except RuntimeError:
            # Lost in this very moment: the server does not know yet, and wants to read on.
            if self._connection is None or not self._connection.closed:
                raise
            return {"type": "http.disconnect"}

    def plain(self, body: bytes, limit: int) -> bytes:
        """`body` without its content encoding; `limit` holds for the result too. Raises `RequestError`."""
        encoding = self.header(b"content-encoding")
        if not encoding or encoding.lower() == b"identity":
            return body
        return decode_request(body, encoding, limit)

    # -- the agent leaves ------------------------------------------------------------------------------------------

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` once when the agent closes its connection. After `body`; until `unwatch`."""
        self._on_gone = on_gone
        if self._connection is not None:
            self._connection.watch(self._left)
        else:
            self._watcher = asyncio.create_task(self._watch())

    def unwatch(self) -> None:
        self._on_gone = None
        if self._connection is not None:
            self._connection.unwatch()
        watcher, self._watcher = self._watcher, None  # else a circle, in which bodies wait for the garbage collector
        if watcher is not None:
            watcher.cancel()

    async def unless_gone(self, waiting: Coroutine[None, None, None]) -> None:
        """Wait for something else than the upstream, between `watch` and `unwatch`. Raises `ClientGone` at once when
        the agent closes its connection."""
        task = asyncio.ensure_future(waiting)
        otherwise = self._on_gone
        self._on_gone = task.cancel
        try:
            if self.gone:
                task.cancel()
            await task
        except asyncio.CancelledError:
            if self.gone:
                raise ClientGone from None
            raise
        finally:
            self._on_gone = otherwise

    async def _watch(self) -> None:
        while (await self._received())["type"] != "http.disconnect":
            pass
        self._left()

    def _left(self) -> None:
        if self._on_gone is not None:  # not the end of our own answer
            self.gone = True
            self._on_gone()

    # -- the answer ------------------------------------------------------------------------------------------------

    def pack(self) -> None:
        """Put a content encoding on what is sent from now on, if the agent takes one."""
        self._packer = packer_for(self.header(b"accept-encoding") or b"")

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer; `headers` hold no framing."""
        packer, self._packer = self._packer, None
        if packer is not None and len(body) >= PACKED_FROM:
            headers, body = [*headers, *_packed(packer)], packer.last(body)
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        if self.note is not None and self.note.call_id:
            headers = [*headers, (CALL_HEADER, self.note.call_id.encode())]
        if self._packer is not None:
            headers = [*headers, *_packed(self._packer)]
        await self._emit({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        if self._packer is not None:
            data = self._packer.piece(data)
        await self._emit({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        if self._packer is not None:
            data = self._packer.last(data)
        await self._emit({"type": "http.response.body", "body": data, "more_body": False})

    async def _emit(self, message: Message) -> None:
        try:
            await self._send(message)
        except RuntimeError:
            # Cut off by one of our limits in this very moment: the server does not know yet, and wants to write.
            if self._connection is None or not self._connection.closed:
                raise


def _packed(packer: Packer) -> Headers:
    return [(b"content-encoding", packer.name), (b"vary", b"accept-encoding")]


def end_to_end(headers: Sequence[tuple[bytes, bytes]], drop: frozenset[bytes]) -> Headers:
    """Those headers that are not of one connection only, nor named there, nor in `drop`."""
    named: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return [
        (name, value) for name, value in headers if name not in HOP_BY_HOP and name not in drop and name not in named
    ]


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The request body is larger than {limit} bytes.", status=413, code="request_too_large")
