"""The gateway: an ASGI application that finds out what a request is, and hands it on.

POST /s/<attempt key>/v1/…    a model endpoint, keyed by the path
POST /v1/…                    the same with the key as API key; without one, under the gateway's own mode
GET  /v1/models               the upstream's
POST /s/<attempt key>/feedback, /v1/feedback    a score from the agent's side, where the attempt allows it
HEAD /                        200
GET  /health, /ready, /metrics                   those who run it (see `operations`)
     /admin/…                 the trainer (see `admin`)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

import msgspec

from outrider.errors import RequestError, StoreError
from outrider.gateway.admin import MAX_BODY_BYTES, Admin
from outrider.gateway.admission import Admission, Refused, stored_version
from outrider.gateway.continuation.start import make_continuation
from outrider.gateway.exchange import JSON_TYPE, ClientGone, Exchange, Receive, Scope, Send
from outrider.gateway.feedback import Feedback
from outrider.gateway.limits import Limits, Room, TooFast
from outrider.gateway.options import GatewayOptions, check_options
from outrider.gateway.relay import Relay
from outrider.gateway.sessions import Sessions, owner_of
from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.logs import LogWriter
from outrider.gateway.telemetry.note import CLIENT_GONE, Note
from outrider.gateway.telemetry.operations import ROUTES, Operations
from outrider.gateway.upstreams.replicas import make_replicas
from outrider.protocols import Store
from outrider.types import Json, Mode
from outrider.wire import Dialect, TokenCounter

log = logging.getLogger("outrider.gateway")

MODELS = b"/v1/models"
FEEDBACK = b"/v1/feedback"
BODIES_AT_ONCE = 16  # of the largest size; more of large ones have to wait


class Gateway:
    """The ASGI application."""

    def __init__(
        self,
        options: GatewayOptions,
        store: Store,
        dialects: Sequence[Dialect],
        log_writer: LogWriter | None = None,
    ) -> None:
        """Without a `log_writer`, calls leave no line."""
        self._routes = {route.encode(): dialect for dialect in dialects for route in dialect.routes}
        self._count_routes = {
            dialect.count_route.encode(): dialect for dialect in dialects if isinstance(dialect, TokenCounter)
        }
        self._default = dialects[0]
        self._counters = Counters()
        admission = Admission(version=stored_version(store), wait_s=options.pause_wait_s)
        self._room = Room(int(BODIES_AT_ONCE * options.max_body_mb * (1 << 20)))
        self._limits = Limits(max_in_flight=options.max_in_flight, rate_per_key=options.rate_per_key)
        self._idle_timeout_s = options.idle_timeout_s
        self._replicas = make_replicas(options)
        self._sessions = Sessions(store, Mode(options.mode), takes_unkeyed=options.takes_unkeyed)
        self._feedback = Feedback(
            store,
            self._counters,
            low=options.reward_min,
            high=options.reward_max,
            agent_final=options.agent_final,
        )
        roles = self._roles = check_options(options)
        self._operations = Operations(
            options,
            store,
            replicas=self._replicas,
            admission=admission,
            limits=self._limits,
            counters=self._counters,
            roles=roles,
            log=log_writer,
        )
        self._admin = Admin(roles, admission, store, self._counters, self._feedback, self._operations.fleet)
        continuation = make_continuation(options, store, dialects, self._counters)
        self._relay = Relay(self._replicas, store, admission, self._counters, options, continuation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, idle_timeout_s=self._idle_timeout_s)
        key, target = _split_key(exchange.path)
        named = self._routes.get(target) or self._count_routes.get(target)
        dialect = named or self._default
        is_call = target.startswith(b"/v1/") and target != FEEDBACK
        note = Note(dialect=named.name if named is not None else "") if is_call else None
        if note is not None:
            exchange.note = note
            exchange.take_room = self._room.take
            note.parent = exchange.header(b"traceparent")
        try:
            await self._handle(exchange, key, target, dialect)
        except ClientGone:
            self._counters.refused(CLIENT_GONE)
            if note is not None:
                note.code = CLIENT_GONE
        except RequestError as error:
            await self._refuse(exchange, dialect, error)
        except StoreError as error:
            await self._refuse(exchange, dialect, Refused(str(error), code="store_failed", retry_after_s=5))
        except Exception:
            log.exception("%s %s", exchange.method, _split_key(exchange.path)[1].decode("latin-1"))
            await self._refuse(exchange, dialect, RequestError("The gateway failed.", status=500, code="gateway"))
        finally:
            self._room.give_back(exchange.room)
            if note is not None:
                self._operations.ended(note, exchange.status)

    def begin(self) -> None:
        """The event loop runs: look after replicas and other gateways."""
        self._operations.begin()

    async def drain(self) -> bool:
        """Refuse new calls and wait for those under way; returns whether all have ended in time."""
        return await self._operations.drain()

    async def end(self) -> None:
        """Say good-bye to those that `begin` told of this gateway. Before `close`."""
        await self._operations.close()

    def close(self) -> None:
        self._replicas.close()

    def replica_states(self) -> list[Json]:
        """As `Replicas.states`."""
        return self._replicas.states()

    async def _handle(self, exchange: Exchange, key: str | None, target: bytes, dialect: Dialect) -> None:
        if key is None and target in ROUTES:
            await self._operations.answer(exchange)
        elif key is None and target.startswith(b"/admin/"):
            await self._admin.handle(exchange)
        elif target == FEEDBACK or (key is not None and target == b"/feedback"):
            await self._give_feedback(exchange, key)
        elif target.startswith(b"/v1/") and not _is_devious(target):
            if self._operations.draining:
                raise Refused("This gateway is about to end; try again.", code="draining", retry_after_s=2)
            with self._limits:
                await self._model_route(exchange, key, target, dialect)
        elif exchange.method == "HEAD" and target in (b"", b"/"):
            await exchange.respond(200, [], b"")  # Claude Code looks whether there is a server
        else:
            raise self._not_found(exchange, target)

    async def _model_route(self, exchange: Exchange, key: str | None, target: bytes, dialect: Dialect) -> None:
        routed = target in self._routes
        if routed and exchange.method != "POST":
            _refuse_method(exchange, target, keyed=key is not None or dialect.translated)
        access = await self._sessions.access(exchange, key)
        self._roles.guard(access.credentials)
        if exchange.note is not None:
            exchange.note.mode, exchange.note.attempt_id = access.mode, access.attempt_id
        self._limits.take(access.owner)
        counter = self._count_routes.get(target)
        full = target + b"?" + exchange.query if exchange.query else target
        if routed and exchange.method == "POST" and (dialect.translated or access.mode is not Mode.PASSTHROUGH):
            await self._relay.record(exchange, full, dialect, access)
        elif counter is not None and exchange.method == "POST" and counter.translated:
            await self._relay.count(exchange, counter, access)
        elif access.keyed and not self._is_model_endpoint(exchange, target):
            raise self._not_found(exchange, target)  # a key opens model endpoints, and nothing else of an engine
        elif access.mode is not Mode.PASSTHROUGH and self._is_disguised(target):
            raise self._not_found(exchange, target)
        else:
            await self._relay.forward(exchange, full, dialect, access)

    def _is_disguised(self, target: bytes) -> bool:
        """A model's route in another spelling: an upstream may take it for that, and nothing would be recorded."""
        return target not in self._routes and unquote_to_bytes(target).rstrip(b"/") in self._routes

    def _is_model_endpoint(self, exchange: Exchange, target: bytes) -> bool:
        if exchange.method == "POST":
            return target in self._routes or target in self._count_routes
        return exchange.method == "GET" and _is_models(target)

    def _not_found(self, exchange: Exchange, target: bytes) -> RequestError:
        message = f"There is no {exchange.method} {target.decode('latin-1')} here."
        known = {*self._routes, *self._count_routes, MODELS}
        if b"/v1" + target in known:
            message += " This client's base URL has to end in /v1."
        elif target.startswith(b"/v1/v1/"):
            message += " This client adds /v1 itself: its base URL must not end in it."
        return RequestError(message, status=404, code="not_found")

    async def _give_feedback(self, exchange: Exchange, key: str | None) -> None:
        if exchange.method != "POST":
            raise RequestError("Feedback takes POST only.", status=405, code="method_not_allowed")
        session = await self._sessions.for_feedback(exchange, key)
        self._limits.take(owner_of(session.attempt_id))
        answer = await self._feedback.from_agent(session, await exchange.body(MAX_BODY_BYTES))
        await exchange.respond(200, [JSON_TYPE], msgspec.json.encode(answer))

    async def _refuse(self, exchange: Exchange, dialect: Dialect, error: RequestError) -> None:
        code = error.code or str(error.status)
        self._counters.refused(code)
        if exchange.note is not None:
            exchange.note.code = code
        if exchange.started:
            return  # too late for a status; leaving without an end closes the connection
        headers = [JSON_TYPE]
        if isinstance(error, Refused | TooFast):
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        if self._operations.draining:
            headers.append((b"connection", b"close"))  # so that the next try finds another gateway
        body = dialect.error(error.status, str(error), code=error.code, param=error.param)
        await exchange.respond(error.status, headers, body)


def _split_key(path: bytes) -> tuple[str | None, bytes]:
    """``/s/KEY/v1/x`` → ``("KEY", b"/v1/x")``; any other path has no key."""
    if not path.startswith(b"/s/"):
        return None, path
    key, slash, rest = path[3:].partition(b"/")
    return unquote_to_bytes(key).decode("latin-1"), slash + rest


def _is_models(target: bytes) -> bool:
    """The list of models, or one of them."""
    return target == MODELS or target.startswith(MODELS + b"/")


def _is_devious(target: bytes) -> bool:
    """An upstream, or a proxy before it, might take such a path for another one."""
    plain = target
    while b"%" in plain and (unquoted := unquote_to_bytes(plain)) != plain:
        plain = unquoted
    return b".." in plain or b"//" in plain or b"\\" in plain or min(plain) < 0x20


def _refuse_method(exchange: Exchange, target: bytes, *, keyed: bool) -> None:
    """Raises `RequestError` for a WebSocket, and with `keyed` for every other request that is no POST."""
    if (exchange.header(b"upgrade") or b"").lower() == b"websocket":
        # Codex takes this status as an invitation to POST at once; others make it try again and again.
        raise RequestError("There is no WebSocket here; use POST.", status=426, code="websocket_not_supported")
    if keyed:
        raise RequestError(f"{target.decode('latin-1')} takes POST only.", status=405, code="method_not_allowed")
