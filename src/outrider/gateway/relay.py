"""Carries calls to the upstream: passed through with nothing kept, recorded, or only to count tokens."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import replace

from outrider.errors import StoreBusy, StoreError
from outrider.gateway.admission import Admission, Refused
from outrider.gateway.continuation.turns import Continuation
from outrider.gateway.exchange import JSON_TYPE, Exchange, Headers, end_to_end
from outrider.gateway.grouping import Chains, is_kept
from outrider.gateway.options import GatewayOptions
from outrider.gateway.recall import Recall, new_call_id
from outrider.gateway.record import CallRecord
from outrider.gateway.recorded import RecordedCall, client_left, tell
from outrider.gateway.redaction.redact import Redactor
from outrider.gateway.sessions import (
    CREDENTIAL_HEADERS,
    TRAJECTORY_HEADER,
    TRAJECTORY_PREFIX,
    Access,
    is_attempt_key,
    token_of,
)
from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.note import Note
from outrider.gateway.upstreams.delivery import Delivery, Outgoing, Route
from outrider.gateway.upstreams.errors import UpstreamError
from outrider.gateway.upstreams.replicas import Replicas
from outrider.gateway.upstreams.retry import RetryPolicy
from outrider.protocols import Store
from outrider.types import Call, CallState, Mode
from outrider.wire import Dialect, TokenCounter, WireRequest

_DROP = frozenset({b"content-length", b"host", b"expect", TRAJECTORY_HEADER})
_DROP_RECORDED = _DROP | {b"accept-encoding", b"content-encoding"}
_IDENTITY = (b"accept-encoding", b"identity")
LONG_BODY = 1 << 18  # to look through one takes some 20 ms
_NOTHING: frozenset[bytes] = frozenset()
_CONTENT_LENGTH = frozenset({b"content-length"})


class Relay:
    """Shared by all calls of a gateway."""

    def __init__(
        self,
        replicas: Replicas,
        store: Store,
        admission: Admission,
        counters: Counters,
        options: GatewayOptions,
        continuation: Continuation | None,
    ) -> None:
        """`continuation` makes the prompts of calls that are trained on or evaluated; without it the engine does.
        Raises `SetupError`."""
        self._route = Route(
            replicas=replicas,
            admission=admission,
            policy=RetryPolicy(retries=options.upstream_retries, budget_s=options.upstream_retry_s),
            total_s=options.upstream_timeout_s,
            max_answer_bytes=int(options.max_answer_mb * (1 << 20)),
        )
        self._store = store
        self._admission = admission
        self._counters = counters
        self._max_body_bytes = int(options.max_body_mb * (1 << 20))
        self._model = options.model
        self._pack_answers = options.pack_answers
        self._sample_rate = options.sample_rate
        self._chains = Chains()
        self._redact = {"off": frozenset(), "record": frozenset({Mode.RECORD}), "all": frozenset(Mode)}[options.redact]
        self._redactor = Redactor(options.redact_patterns)
        self._continuation = continuation
        self._recall = Recall(store)

    async def forward(self, exchange: Exchange, target: bytes, dialect: Dialect, access: Access) -> None:
        """Pass a call through and keep nothing. `dialect` words the errors that are the gateway's own."""
        await self._forward(exchange, target, dialect, access, await exchange.body(self._max_body_bytes))

    async def _forward(self, exchange: Exchange, target: bytes, dialect: Dialect, access: Access, body: bytes) -> None:
        outgoing = Outgoing(exchange.method, target, _request_headers(exchange, _DROP), body)
        delivery = Delivery(self._route, exchange, outgoing, pin=access.attempt_id, repeatable=False, held=False)
        exchange.watch(delivery.abort)
        try:
            await _pass_on(exchange, delivery, dialect)
        finally:
            delivery.close()
            exchange.unwatch()
            self._counters.forwarded()

    async def record(self, exchange: Exchange, target: bytes, dialect: Dialect, access: Access) -> None:
        """Pass a call on and store it, where the mode says so. Raises `RequestError` where the agent gets an error."""
        body = await exchange.body(self._max_body_bytes)
        request = dialect.parse(exchange.plain(body, self._max_body_bytes))
        call_id = new_call_id(access.owner)
        access = await self._sampled(access, request, dialect, call_id)
        if access.mode is Mode.PASSTHROUGH and not dialect.translated:
            await self._forward(exchange, target, dialect, access, body)
            return
        if self._pack_answers:
            exchange.pack()
        tokens = access.ours
        note = _noted(exchange, call_id, access, request)
        await self._recall.earlier(dialect, request, access.owner)
        prepared = dialect.prepare(
            request,
            overrides=access.overrides if tokens else {},
            tokens=tokens,
            model=self._model if tokens else "",
            owner=access.owner,
            call_id=call_id,
        )
        self._counters.left_out(prepared.notes)
        turn, left = None, ""
        if tokens and self._continuation is not None:
            turn, left = await self._continuation.turn(access.attempt_id, prepared, target)
        headers = _translated_headers(exchange) if prepared.path else _recorded_headers(exchange)
        path = turn.path if turn is not None else prepared.path
        sent = turn.body() if turn is not None else prepared.body
        record = CallRecord(
            id=call_id,
            dialect=dialect,
            access=access,
            request=request,
            prepared=replace(prepared, body=b""),
            turn=turn,
            left=left,
        )
        delivery = Delivery(
            self._route,
            exchange,
            Outgoing(exchange.method, path.encode() or target, headers, sent),
            pin=access.attempt_id,
            on_send=lambda: record.begin(version=self._admission.version if tokens else None),
        )
        del prepared, sent  # they may be large: the delivery lets go of them once the answer has begun
        exchange.watch(lambda: client_left(delivery, record))
        self._admission.watch(record.published)
        try:
            await RecordedCall(exchange, delivery, record, lambda record: self._commit(record, note)).run()
        except asyncio.CancelledError:
            record.replica, record.retries = delivery.replica, tuple(delivery.retries)
            self._interrupted(record, exchange.status, note)
            raise
        finally:
            self._admission.unwatch(record.published)
            delivery.close()
            exchange.unwatch()

    async def _sampled(self, access: Access, request: WireRequest, dialect: Dialect, call_id: str) -> Access:
        """The same under the trajectory that a call belongs to; passed through where that is not kept."""
        if access.keyed or access.mode is not Mode.RECORD:
            return access
        name = access.attempt_id
        if not name:
            earlier = await self._recall.trajectory(dialect, request, access.owner, self._chains.answers)
            name = earlier or TRAJECTORY_PREFIX + self._chains.trajectory(access.owner, request.fields)
        self._chains.answered(call_id, name)
        if is_kept(name, self._sample_rate):
            return replace(access, attempt_id=name)
        self._counters.unsampled()
        return replace(access, attempt_id=name, mode=Mode.PASSTHROUGH)

    async def count(self, exchange: Exchange, dialect: TokenCounter, access: Access) -> None:
        """Answer how many tokens a prompt has; nothing is recorded. Raises `RequestError`."""
        body = exchange.plain(await exchange.body(self._max_body_bytes), self._max_body_bytes)
        asked = dialect.count_request(body, model=self._model if access.ours else "")
        if access.ours and self._continuation is not None:
            tokens = await self._continuation.count_prompt(access.attempt_id, asked)
            if tokens is not None:
                reply = dialect.count_reply(200, b'{"usage":{"prompt_tokens":%d}}' % tokens)
                await exchange.respond(reply.status, [JSON_TYPE], reply.body)
                return
        outgoing = Outgoing("POST", asked.path.encode(), _translated_headers(exchange), asked.body)
        delivery = Delivery(self._route, exchange, outgoing, pin=access.attempt_id)
        exchange.watch(delivery.abort)
        try:
            call = await delivery.start()
            reply = dialect.count_reply(call.status, await call.read())
            await exchange.respond(reply.status, [JSON_TYPE], reply.body)
        except UpstreamError as error:
            await tell(exchange, dialect, error)
        finally:
            delivery.close()
            exchange.unwatch()

    async def _commit(self, record: CallRecord, note: Note) -> None:
        """Make the call durable. Raises `Refused` when that fails."""
        mode = record.access.mode
        if mode is Mode.PASSTHROUGH:
            self._counters.forwarded()
            return
        call = record.finish(version=self._admission.version if record.access.ours else None)
        stored = call
        if self._may_hold_secrets(call, record.access):
            stored, hits = await self._redacted(call, record.access)
            self._counters.redacted(hits)
        began = time.monotonic()
        try:
            await asyncio.wrap_future(self._store.append_call(stored))
        except StoreBusy:
            note.code = "store_busy"
            self._counters.not_recorded("store_busy")
            raise Refused("Too many calls are waiting for the disk.", code="store_busy", retry_after_s=1) from None
        except StoreError as error:
            note.code = "store_failed"
            self._counters.not_recorded("store_failed")
            raise Refused(f"The call could not be recorded: {error}", code="store_failed", retry_after_s=5) from error
        note.call, note.commit_s, note.code = stored, time.monotonic() - began, record.code
        self._counters.recorded(stored, mode)
        if record.turn is not None:
            record.turn.committed(call)

    def _interrupted(self, record: CallRecord, status: int, note: Note) -> None:
        """Keep what there is of a call that ends with the process, if no outcome of it is on its way to the store."""
        if record.finished or not record.begun or record.access.mode is Mode.PASSTHROUGH:
            return
        record.interrupted(status)
        call = record.finish(version=self._admission.version if record.access.ours else None)
        if self._may_hold_secrets(call, record.access):
            call, _ = self._redactor.call(call, record.access.credentials)
        with contextlib.suppress(StoreError):
            self._store.append_call(call)  # closing the store waits for it
            note.call, note.code = call, record.code

    def _may_hold_secrets(self, call: Call, access: Access) -> bool:
        """An upstream that refuses a provider key may spell it in its error, and that is stored in no mode."""
        return access.mode in self._redact or (call.state is not CallState.COMPLETE and bool(access.credentials))

    async def _redacted(self, call: Call, access: Access) -> tuple[Call, Counter[str]]:
        if len(call.request) + len(call.response) < LONG_BODY:
            return self._redactor.call(call, access.credentials)
        return await asyncio.to_thread(self._redactor.call, call, access.credentials)  # others go on meanwhile


async def _pass_on(exchange: Exchange, delivery: Delivery, dialect: Dialect) -> None:
    try:
        call = await delivery.start()
        # These have no body, whatever length it says.
        drop = _CONTENT_LENGTH if call.status in (204, 304) else _NOTHING
        await exchange.start(call.status, end_to_end(call.headers, drop))
        while data := await call.chunk():
            await exchange.write(data)
        await exchange.finish()
    except UpstreamError as error:
        # Once the answer has begun only an abrupt end can tell; returning without `finish` closes the connection.
        await tell(exchange, dialect, error)


def _noted(exchange: Exchange, call_id: str, access: Access, request: WireRequest) -> Note:
    """What is known of a call that is recorded, put down for the log."""
    note = exchange.note or Note()
    note.call_id, note.attempt_id = call_id, access.attempt_id
    note.model, note.streamed = request.model, request.stream
    note.mode, note.kept = access.mode, access.mode is not Mode.PASSTHROUGH
    return note


def _request_headers(exchange: Exchange, drop: frozenset[bytes]) -> Headers:
    return [
        (name, value)
        for name, value in end_to_end(exchange.headers, drop)
        if not (name in CREDENTIAL_HEADERS and is_attempt_key(value))
    ]


def _recorded_headers(exchange: Exchange) -> Headers:
    return [*_request_headers(exchange, _DROP_RECORDED), _IDENTITY]


def _translated_headers(exchange: Exchange) -> Headers:
    """For an upstream of another protocol, where a key is a bearer token and Anthropic's own headers mean nothing."""
    headers: Headers = []
    bearer = None
    for name, value in _recorded_headers(exchange):
        if name == b"x-api-key":
            bearer = (b"authorization", b"Bearer " + token_of(value))
        elif not name.startswith(b"anthropic-"):
            headers.append((name, value))
    if bearer is not None and all(name != b"authorization" for name, _ in headers):
        headers.append(bearer)
    return headers
