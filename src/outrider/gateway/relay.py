"""Carries one call to the upstream and its answer back; in recording modes the answer ends after the commit.

Plain answers are read whole, stored, then sent. Streams are forwarded as they come, but the event that ends them, and
everything from an error on, is held back until the store has the call. Nothing here changes a byte of an answer; a
dialect's reader may leave out what only the gateway had asked for.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

import zstandard

from outrider.errors import StoreBusy, StoreError
from outrider.gateway.admission import Admission, Refused
from outrider.gateway.counters import Counters
from outrider.gateway.encoding import decoder
from outrider.gateway.exchange import JSON_TYPE, Exchange, Headers, end_to_end
from outrider.gateway.record import CallRecord
from outrider.gateway.sessions import TRAJECTORY_HEADER, Access, is_attempt_key
from outrider.gateway.sse import EventSplitter
from outrider.gateway.upstream import Upstream, UpstreamCall, UpstreamError
from outrider.protocols import Dialect, Event, Store
from outrider.types import Mode

# A client that leaves once the model has said everything gets its call recorded whole, if the rest comes soon.
REST_S = 5.0
CLIENT_CLOSED = 499  # nginx's number for an answer that nobody waited for

_DROP = frozenset({b"content-length", b"host", b"expect", TRAJECTORY_HEADER})
_DROP_RECORDED = _DROP | {b"accept-encoding", b"content-encoding"}
_IDENTITY = (b"accept-encoding", b"identity")
_NOTHING: frozenset[bytes] = frozenset()

Undo = Callable[[bytes], bytes]
Commit = Callable[[CallRecord], Awaitable[None]]


class Relay:
    """Shared by all calls of a gateway."""

    def __init__(
        self, upstream: Upstream, store: Store, admission: Admission, counters: Counters, *, max_body_bytes: int
    ) -> None:
        self._upstream = upstream
        self._store = store
        self._admission = admission
        self._counters = counters
        self._max_body_bytes = max_body_bytes

    async def forward(self, exchange: Exchange, target: bytes, dialect: Dialect) -> None:
        """Pass a call through and keep nothing. `dialect` words the errors that are the gateway's own."""
        body = await exchange.body(self._max_body_bytes)
        call = self._upstream.call(exchange.method, target, _request_headers(exchange, _DROP), body)
        await self._admission.enter()
        exchange.watch(call.abort)
        try:
            await call.start()
            await exchange.start(call.status, end_to_end(call.headers, _NOTHING))
            while data := await call.chunk():
                await exchange.write(data)
            await exchange.finish()
        except UpstreamError as error:
            # Once the answer has begun only an abrupt end can tell; returning without `finish` closes the connection.
            if not exchange.started and not exchange.gone:
                await exchange.respond(error.status, [JSON_TYPE], dialect.error(error.status, f"Upstream: {error}."))
        finally:
            call.abort()
            exchange.unwatch()
            self._admission.leave()
            self._counters.forwarded()

    async def record(self, exchange: Exchange, target: bytes, dialect: Dialect, access: Access) -> None:
        """Pass a call on and store it. Raises `RequestError` where the agent gets an error instead of an answer."""
        body = await exchange.plain_body(self._max_body_bytes)
        request = dialect.parse(body)
        tokens = access.mode in (Mode.TRAIN, Mode.EVAL)
        prepared = dialect.prepare(request, overrides=access.overrides if tokens else {}, tokens=tokens)
        headers = [*_request_headers(exchange, _DROP_RECORDED), _IDENTITY]
        call = self._upstream.call(exchange.method, target, headers, prepared.body)
        await self._admission.enter()
        version = self._admission.version if tokens else None
        record = CallRecord(dialect=dialect, access=access, request=request, prepared=prepared, version=version)
        exchange.watch(lambda: _client_left(call, record))
        try:
            await _RecordedCall(exchange, call, record, self._commit).run()
        finally:
            call.abort()
            exchange.unwatch()
            self._admission.leave()

    async def _commit(self, record: CallRecord) -> None:
        """Make the call durable. Raises `Refused` when that fails."""
        ours = record.access.mode in (Mode.TRAIN, Mode.EVAL)
        call = record.finish(version=self._admission.version if ours else None)
        try:
            await asyncio.wrap_future(self._store.append_call(call))
        except StoreBusy:
            self._counters.not_recorded("store_busy")
            raise Refused("Too many calls are waiting for the disk.", code="store_busy", retry_after_s=1) from None
        except StoreError as error:
            self._counters.not_recorded("store_failed")
            raise Refused(f"The call could not be recorded: {error}", code="store_failed", retry_after_s=5) from error
        self._counters.recorded(call, record.access.mode)


class _RecordedCall:
    """One call in a recording mode, from the first byte upstream to the last byte to the agent."""

    def __init__(self, exchange: Exchange, call: UpstreamCall, record: CallRecord, commit: Commit) -> None:
        self._exchange = exchange
        self._call = call
        self._record = record
        self._commit = commit
        self._dialect = record.dialect

    async def run(self) -> None:
        call = self._call
        try:
            await call.start()
            undo, headers = _decoding(end_to_end(call.headers, frozenset({b"content-length"})))
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
            shown = self._read_body(body)
        except UpstreamError as error:
            record.response = record.response or call.partial()
            await self._no_answer(error)
            return
        record.status = call.status
        await self._commit(record)
        if not self._exchange.gone:
            await self._exchange.respond(call.status, headers, shown)

    def _read_body(self, body: bytes) -> bytes:
        """What the agent gets. Raises `UpstreamError` for a success that holds no answer."""
        record, status = self._record, self._call.status
        if not 200 <= status < 300:
            record.failed(f"the upstream answered with status {status}")
            return body
        shown = record.reader.body(body)
        if record.reader.error:
            record.failed(record.reader.error)
        else:
            found = record.reader.result()
            if not found.choices:
                raise UpstreamError("cut", f"its answer cannot be read: {found.problem or 'it has no choices'}")
        return shown

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
            await self._exchange.respond(error.status, [JSON_TYPE], self._dialect.error(error.status, message))

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, headers: Headers, undo: Undo | None) -> None:
        record, call, exchange = self._record, self._call, self._exchange
        splitter = EventSplitter()
        raw: list[bytes] = []
        held: list[bytes] = []
        failure: UpstreamError | None = None
        await exchange.start(200, headers)
        try:
            while data := await call.chunk():
                if undo is not None:
                    data = _undone(undo, data)
                raw.append(data)
                shown = self._read_events(splitter.feed(data), held)
                if shown:
                    await exchange.write(shown)
            shown = self._read_events(splitter.end(), held)
            if shown:
                await exchange.write(shown)
        except UpstreamError as error:
            failure = error
        record.response = b"".join(raw)
        self._judge_stream(failure)
        try:
            await self._commit(record)
        except Refused as refused:
            await exchange.finish(self._dialect.error_event(refused.status, str(refused), code=refused.code))
            return
        if record.error and not record.reader.error:  # in place of a [DONE], which would be taken for a clean end
            status = failure.status if failure else 502
            held = [self._dialect.error_event(status, f"Upstream: {record.error}.")]
        await exchange.finish(b"".join(held))

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


def _client_left(call: UpstreamCall, record: CallRecord) -> None:
    if record.reader.finished:
        asyncio.get_running_loop().call_later(REST_S, call.abort)
    else:
        call.abort()


def _request_headers(exchange: Exchange, drop: frozenset[bytes]) -> Headers:
    return [
        (name, value)
        for name, value in end_to_end(exchange.headers, drop)
        if not (name in (b"authorization", b"x-api-key") and is_attempt_key(value))
    ]


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
