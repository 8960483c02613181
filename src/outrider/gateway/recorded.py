"""One call that is recorded or translated, from the first byte upstream to the last byte to the agent.

Plain answers are read whole, stored, then sent. Streams are forwarded as they come, but the event that ends them, and
everything from an error on, is held back until the store has the call. Nothing here changes a byte of an answer; a
dialect's reader may leave out what only the gateway had asked for, or put the answer into the agent's protocol.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from collections.abc import Awaitable, Callable

import zstandard

from outrider.gateway.admission import Refused
from outrider.gateway.encoding import TooLong, Unpacker, unpacker
from outrider.gateway.exchange import JSON_TYPE, ClientGone, Exchange, Headers, end_to_end
from outrider.gateway.record import CallRecord
from outrider.gateway.sse import EventSplitter
from outrider.gateway.telemetry.note import CLIENT_GONE
from outrider.gateway.upstreams.delivery import Delivery
from outrider.gateway.upstreams.errors import UpstreamError, too_large
from outrider.gateway.upstreams.upstream import UpstreamCall
from outrider.wire import Dialect, ErrorReply, Event

# A client that leaves once the model has said everything gets its call recorded whole, if the rest comes soon.
REST_S = 5.0
END_S = 1.0  # how long an upstream may take to end its stream after the protocol's last event
CLIENT_CLOSED = 499  # nginx's number for an answer that nobody waited for

_CONTENT_LENGTH = frozenset({b"content-length"})
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")

Undo = Callable[[bytes], bytes]
"""Raises `UpstreamError`."""
Commit = Callable[[CallRecord], Awaitable[None]]


class RecordedCall:
    """`commit` makes the call durable, or raises `Refused`."""

    def __init__(self, exchange: Exchange, delivery: Delivery, record: CallRecord, commit: Commit) -> None:
        self._exchange = exchange
        self._delivery = delivery
        self._record = record
        self._commit = commit
        self._translated = bool(record.prepared.path) or record.turn is not None

    async def run(self) -> None:
        """Raises `Refused` where the agent gets an error instead of an answer, and `ClientGone` where none was asked
        for yet."""
        try:
            call, first = await self._answer()
            self._delivery.settle()
            if self._translated and _streams(call) and not self._record.streams:
                raise UpstreamError("upstream_invalid", "it answers with a stream, which was not asked for")
            headers = end_to_end(call.headers, _CONTENT_LENGTH)
            undo, headers = _decoding(headers, self._delivery.max_answer_bytes)
        except UpstreamError as error:
            await self._no_answer(error)
            return
        except ClientGone:
            if not self._record.begun:
                raise
            await self._no_answer(UpstreamError("aborted", "the client left between two sendings"))
            return
        if _streams(call):
            await self._stream(call, first, headers, undo)
        else:
            await self._plain(call.status, first, headers, undo)

    async def _answer(self) -> tuple[UpstreamCall, bytes]:
        """The upstream's answer, and its body; of a stream the first bytes. Raises `UpstreamError`, `ClientGone`.

        Until then the agent has got nothing, so an answer that breaks off may be asked for again.
        """
        call = await self._delivery.start()
        while True:
            try:
                first = await (call.chunk() if _streams(call) else call.read())
                if not first and _streams(call):
                    raise UpstreamError("upstream_cut", "the stream ended before it began")
                return call, first
            except UpstreamError as error:
                self._record.response = call.partial()
                call = await self._delivery.again(error)

    async def _store(self) -> None:
        """Raises `Refused`."""
        record, delivery = self._record, self._delivery
        record.replica = delivery.replica
        record.retries = tuple(delivery.retries)
        await self._commit(record)

    # -- plain -----------------------------------------------------------------------------------------------------

    async def _plain(self, status: int, body: bytes, headers: Headers, undo: Undo | None) -> None:
        record = self._record
        record.response = body
        try:
            if undo is not None:
                record.response = body = undo(body)
            reply = self._read_body(status, body)
        except UpstreamError as error:
            await self._no_answer(error)
            return
        record.status = reply.status
        await self._store()
        if self._translated:
            kind = _EVENT_STREAM if reply.streamed else JSON_TYPE
            headers = [kind, *(header for header in headers if header[0] != b"content-type")]
        if not self._exchange.gone:
            await self._exchange.respond(reply.status, headers, reply.body)

    def _read_body(self, status: int, body: bytes) -> ErrorReply:
        """What the agent gets. Raises `UpstreamError` for a success that holds no answer, and for a redirection: an
        agent that follows it goes around the gateway, and nothing of it is recorded."""
        record = self._record
        if 300 <= status < 400:
            raise UpstreamError(
                "upstream_invalid", f"it redirects with status {status}; --upstream has to name the target"
            )
        if not 200 <= status < 300:
            record.refused(status)
            return record.reader.error_body(status, body)
        shown = record.reader.body(body)
        found = record.reader.result()
        if not found.choices and (found.problem or not record.reader.error):
            problem = found.problem or "it has no choices"
            raise UpstreamError("upstream_invalid", f"its answer cannot be read: {problem}")
        if record.reader.error:
            record.failed(record.reader.error)
            # In the upstream's own protocol the agent gets what it would have got without us, the 200 included.
            return ErrorReply(502 if self._translated else status, shown)
        # Where a stream was asked for, a dialect makes one of a whole answer.
        return ErrorReply(status, shown, streamed=self._translated and not shown.startswith(b"{"))

    async def _no_answer(self, error: UpstreamError) -> None:
        """The agent gets an error of ours, since there is nothing of the upstream's that could be sent."""
        record = self._record
        if self._exchange.gone:
            record.status = CLIENT_CLOSED
            record.cancelled()
        else:
            record.status = error.status
            record.failed(f"{error.code}: {error}", code=error.code)
        await self._store()
        await tell(self._exchange, record.dialect, error)

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, call: UpstreamCall, data: bytes, headers: Headers, undo: Undo | None) -> None:
        """`data` came first."""
        record, exchange, reader = self._record, self._exchange, self._record.reader
        record.arrives = True
        raw: list[bytes] = []
        held: list[bytes] = []
        failure: UpstreamError | None = None
        await exchange.start(200, headers)
        try:
            await self._forward_events(call, data, raw, held, undo)
            held.append(reader.end())
        except UpstreamError as error:
            failure = error
        finally:
            record.response = b"".join(raw)  # also where the process ends
        failure = self._judge_stream(failure)
        try:
            await self._store()
        except Refused as refused:
            await exchange.finish(reader.fail(refused.status, str(refused), code=refused.code))
            return
        if failure is not None:  # in place of a [DONE], which would be taken for a clean end
            held = [reader.fail(failure.status, f"Upstream: {failure}.", code=failure.code)]
        await exchange.finish(b"".join(held))

    async def _forward_events(
        self, call: UpstreamCall, data: bytes, raw: list[bytes], held: list[bytes], undo: Undo | None
    ) -> None:
        """Until the upstream's stream ends; all its bytes go into `raw`. Raises `UpstreamError`."""
        splitter = EventSplitter()
        ends_at = 0.0  # once all is said: some upstreams never close the connection, and the agent waits for the end
        while data:
            if undo is not None:
                data = undo(data)
            raw.append(data)
            shown = self._read_events(splitter.feed(data), held)
            if shown:
                await self._exchange.write(shown)
            if self._record.reader.terminal:
                ends_at = ends_at or asyncio.get_running_loop().time() + END_S
                data = await _chunk_before(call, ends_at)
            else:
                data = await call.chunk()
        # An event without its blank line: what is sent after it would become a part of it, so it waits for the verdict.
        held.insert(0, self._read_events(splitter.end(), held))

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

    def _judge_stream(self, failure: UpstreamError | None) -> UpstreamError | None:
        """Settle how the call ended. Returns what the agent has to be told in place of the end of its stream."""
        record, reader = self._record, self._record.reader
        if reader.error:  # the upstream tells it itself
            record.failed(reader.error)
            return None
        if failure is not None and self._exchange.gone:
            if not reader.finished:
                record.cancelled()
            return None
        if failure is not None and reader.terminal:
            failure = None  # all was said
        if failure is None and not reader.finished and not (reader.terminal and reader.result().choices):
            failure = UpstreamError("upstream_cut", "the stream ended before the answer did")
        if failure is not None:
            record.failed(f"{failure.code}: {failure}", code=failure.code)
        return failure


async def _chunk_before(call: UpstreamCall, ends_at: float) -> bytes:
    """Nothing where none comes in time."""
    try:
        async with asyncio.timeout_at(ends_at):
            return await call.chunk()
    except TimeoutError:
        return b""


def client_left(delivery: Delivery, record: CallRecord) -> None:
    """What to do when the agent has closed its connection."""
    if record.reader.finished:
        asyncio.get_running_loop().call_later(REST_S, delivery.abort)
    else:
        delivery.abort()


async def tell(exchange: Exchange, dialect: Dialect, error: UpstreamError) -> None:
    """An error of ours, where the agent waits for an answer that has not begun."""
    if exchange.note is not None and not exchange.note.code:
        exchange.note.code = CLIENT_GONE if exchange.gone else error.code
    if exchange.started or exchange.gone:
        return
    headers = [JSON_TYPE]
    if error.retry_after_s:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    body = dialect.error(error.status, f"Upstream: {error}.", code=error.code)
    await exchange.respond(error.status, headers, body)


def _streams(call: UpstreamCall) -> bool:
    return call.status == 200 and any(
        name == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in call.headers
    )


def _decoding(headers: Headers, limit: float) -> tuple[Undo | None, Headers]:
    """How to undo the content encoding, if there is one, and the headers without it. Raises `UpstreamError`."""
    encoding = next((value for name, value in headers if name == b"content-encoding"), b"").lower()
    if encoding in (b"", b"identity"):
        return None, headers
    found = unpacker(encoding, limit)
    if found is None:
        raise UpstreamError(
            "upstream_invalid", f"its answer has the Content-Encoding {encoding.decode('latin-1')!r}, unasked for"
        )
    undo = functools.partial(_undone, found, limit)
    return undo, [(name, value) for name, value in headers if name != b"content-encoding"]


def _undone(packed: Unpacker, limit: float, data: bytes) -> bytes:
    try:
        return packed.unpack(data)
    except TooLong:
        raise too_large(limit) from None
    except (zlib.error, zstandard.ZstdError) as error:
        raise UpstreamError("upstream_invalid", f"its answer's content encoding is broken: {error}") from error
