"""One call that is recorded or translated, from the first byte upstream to the last byte to the agent.

Plain answers are read whole, stored, then sent. Streams are forwarded as they come, but the event that ends them, and
everything from an error on, is held back until the store has the call. Nothing here changes a byte of an answer; a
dialect's reader may leave out what only the gateway had asked for, or put the answer into the agent's protocol.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

import zstandard

from outrider.gateway.admission import Refused
from outrider.gateway.encoding import decoder
from outrider.gateway.exchange import JSON_TYPE, Exchange, Headers, end_to_end
from outrider.gateway.record import CallRecord
from outrider.gateway.sse import EventSplitter
from outrider.gateway.upstream import UpstreamCall, UpstreamError
from outrider.wire import ErrorReply, Event

# A client that leaves once the model has said everything gets its call recorded whole, if the rest comes soon.
REST_S = 5.0
CLIENT_CLOSED = 499  # nginx's number for an answer that nobody waited for

_CONTENT_LENGTH = frozenset({b"content-length"})
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")

Undo = Callable[[bytes], bytes]
Commit = Callable[[CallRecord], Awaitable[None]]


class RecordedCall:
    """`commit` makes the call durable, or raises `Refused`."""

    def __init__(self, exchange: Exchange, call: UpstreamCall, record: CallRecord, commit: Commit) -> None:
        self._exchange = exchange
        self._call = call
        self._record = record
        self._commit = commit
        self._translated = bool(record.prepared.path) or record.turn is not None

    async def run(self) -> None:
        """Raises `Refused` where the agent gets an error instead of an answer."""
        call = self._call
        try:
            await call.start()
            undo, headers = _decoding(end_to_end(call.headers, _CONTENT_LENGTH))
        except UpstreamError as error:
            await self._no_answer(error)
            return
        if call.status == 200 and _is_event_stream(headers):
            await self._stream(headers, undo)
        else:
            await self._plain(headers, undo)

    # -- plain -----------------------------------------------------------------------------------------------------

    async def _plain(self, headers: Headers, undo: Undo | None) -> None:
        record, call = self._record, self._call
        try:
            body = await call.read()
            record.response = body
            if undo is not None:
                record.response = body = _undone(undo, body)
            reply = self._read_body(body)
        except UpstreamError as error:
            record.response = record.response or call.partial()
            await self._no_answer(error)
            return
        record.status = reply.status
        await self._commit(record)
        if self._translated:
            kind = _EVENT_STREAM if reply.streamed else JSON_TYPE
            headers = [kind, *(header for header in headers if header[0] != b"content-type")]
        if not self._exchange.gone:
            await self._exchange.respond(reply.status, headers, reply.body)

    def _read_body(self, body: bytes) -> ErrorReply:
        """What the agent gets. Raises `UpstreamError` for a success that holds no answer."""
        record, status = self._record, self._call.status
        if not 200 <= status < 300:
            record.failed(f"the upstream answered with status {status}")
            return record.reader.error_body(status, body)
        shown = record.reader.body(body)
        if record.reader.error:
            record.failed(record.reader.error)
            # In the upstream's own protocol the agent gets what it would have got without us, the 200 included.
            return ErrorReply(502 if self._translated else status, shown)
        found = record.reader.result()
        if not found.choices:
            raise UpstreamError("cut", f"its answer cannot be read: {found.problem or 'it has no choices'}")
        return ErrorReply(status, shown)

    async def _no_answer(self, error: UpstreamError) -> None:
        """The agent gets an error of ours, since there is nothing of the upstream's that could be sent."""
        record = self._record
        if self._exchange.gone:
            record.status = CLIENT_CLOSED
            record.cancelled()
        else:
            record.status = error.status
            record.failed(str(error))
        await self._commit(record)
        if not self._exchange.gone:
            message = f"Upstream: {error}."
            await self._exchange.respond(error.status, [JSON_TYPE], record.dialect.error(error.status, message))

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, headers: Headers, undo: Undo | None) -> None:
        record, exchange, reader = self._record, self._exchange, self._record.reader
        raw: list[bytes] = []
        held: list[bytes] = []
        failure: UpstreamError | None = None
        await exchange.start(200, headers)
        try:
            await self._forward_events(raw, held, undo)
            held.append(reader.end())
        except UpstreamError as error:
            failure = error
        record.response = b"".join(raw)
        self._judge_stream(failure)
        try:
            await self._commit(record)
        except Refused as refused:
            await exchange.finish(reader.fail(refused.status, str(refused), code=refused.code))
            return
        if record.error and not reader.error:  # in place of a [DONE], which would be taken for a clean end
            held = [reader.fail(failure.status if failure else 502, f"Upstream: {record.error}.")]
        await exchange.finish(b"".join(held))

    async def _forward_events(self, raw: list[bytes], held: list[bytes], undo: Undo | None) -> None:
        """Until the upstream's stream ends; all its bytes go into `raw`. Raises `UpstreamError`."""
        splitter = EventSplitter()
        while data := await self._call.chunk():
            if undo is not None:
                data = _undone(undo, data)
            raw.append(data)
            shown = self._read_events(splitter.feed(data), held)
            if shown:
                await self._exchange.write(shown)
        shown = self._read_events(splitter.end(), held)
        if shown:
            await self._exchange.write(shown)

    def _read_events(self, events: list[Event], held: list[bytes]) -> bytes:
        """Read `events`; returns what the agent gets now and puts what has to wait for the commit into `held`."""
        reader = self._record.reader
        now = []
        for event in events:
            if event.data:
                self._record.first_token()
            shown = reader.event(event)
            if held or reader.terminal or reader.error:
                held.append(shown)
            else:
                now.append(shown)
        return now[0] if len(now) == 1 else b"".join(now)

    def _judge_stream(self, failure: UpstreamError | None) -> None:
        record, reader = self._record, self._record.reader
        if reader.error:
            record.failed(reader.error)
        elif failure is not None and self._exchange.gone:
            if not reader.finished:
                record.cancelled()
        elif failure is not None and not reader.terminal:
            record.failed(str(failure))
        elif not reader.finished and not (reader.terminal and reader.result().choices):
            record.failed("the stream ended before the answer did")


def client_left(call: UpstreamCall, record: CallRecord) -> None:
    """What to do when the agent has closed its connection."""
    if record.reader.finished:
        asyncio.get_running_loop().call_later(REST_S, call.abort)
    else:
        call.abort()


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _decoding(headers: Headers) -> tuple[Undo | None, Headers]:
    """How to undo the content encoding, if there is one, and the headers without it. Raises `UpstreamError`."""
    encoding = next((value for name, value in headers if name == b"content-encoding"), b"identity").lower()
    if encoding == b"identity":
        return None, headers
    found = decoder(encoding)
    if found is None:
        raise UpstreamError("cut", f"its answer has the Content-Encoding {encoding.decode('latin-1')!r}, unasked for")
    return found.decompress, [(name, value) for name, value in headers if name != b"content-encoding"]


def _undone(undo: Undo, data: bytes) -> bytes:
    try:
        return undo(data)
    except (zlib.error, zstandard.ZstdError) as error:
        raise UpstreamError("cut", f"its answer's content encoding is broken: {error}") from error
