"""The control side of the gateway, JSON in and out. Each route opens with the key of one role, or of a higher one.

POST /admin/pause, /admin/resume          a trainer, around a publish
POST /admin/attempts                      a trainer, to open an attempt and get its key
POST /admin/attempts/ID/seal              a trainer, to end it
GET  /admin/attempts/ID                   a reader
POST /admin/attempts/ID/rewards           a grader, also after the attempt has ended
GET  /admin/attempts/ID/rewards           a reader
GET  /admin/attempts/ID/calls             a reader
GET  /admin/stats                         a reader
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import msgspec

from outrider.errors import RequestError
from outrider.gateway.admission import Admission, stored_version
from outrider.gateway.attempts import Attempts, OpenAttempt
from outrider.gateway.exchange import JSON_TYPE, Exchange
from outrider.gateway.feedback import Feedback, as_json, plain
from outrider.gateway.fleet import Fleet
from outrider.gateway.roles import GRADE, READ, TRAIN, Role, Roles
from outrider.gateway.sessions import token_of
from outrider.gateway.telemetry.counters import Counters
from outrider.protocols import Store
from outrider.types import Call, Json

log = logging.getLogger("outrider.gateway")

MAX_BODY_BYTES = 1 << 16

# An id may hold a slash: it is one segment, with the slash spelled %2F.
_ATTEMPT = re.compile(rb"/admin/attempts/([^/]+)(?:/(rewards|calls|seal))?")


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0


class _Resume(msgspec.Struct, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Admin:
    """Without any key nobody is let in."""

    def __init__(
        self,
        roles: Roles,
        admission: Admission,
        store: Store,
        counters: Counters,
        feedback: Feedback,
        fleet: Fleet | None,
    ) -> None:
        """`fleet` takes part where there may be other gateways on the store."""
        self._roles = roles
        self._admission = admission
        self._store = store
        self._counters = counters
        self._feedback = feedback
        self._attempts = Attempts(store)
        self._fleet = fleet

    async def handle(self, exchange: Exchange) -> None:
        """Raises `RequestError`."""
        key = token_of(exchange.header(b"authorization") or b"")
        route = (exchange.method, exchange.path)
        attempt = _ATTEMPT.fullmatch(exchange.path)
        role = self._roles.allow(key, _roles_for(route, attempt))
        body = await exchange.body(MAX_BODY_BYTES)
        answer: Any
        if attempt is not None:
            answer = await self._attempt(exchange, _attempt_id(attempt[1]), attempt[2], role, body)
        elif route == ("POST", b"/admin/attempts"):
            answer = await self._attempts.open(_decode(body, OpenAttempt))
        elif route == ("POST", b"/admin/pause"):
            pause = self._admission.pause if self._fleet is None else self._fleet.pause
            answer = {"in_flight": await pause(_decode(body, _Pause).timeout_s)}
        elif route == ("POST", b"/admin/resume"):
            version = _decode(body, _Resume).version
            if version is None:  # nothing was published
                version = await asyncio.to_thread(stored_version, self._store)
            if self._fleet is None:
                await self._admission.resume(version, self._store.set_value)
            else:
                await self._fleet.resume(version)
            answer = {"policy_version": version}
        elif route == ("GET", b"/admin/stats"):
            answer = self._stats()
        else:
            raise _no_route(exchange)
        if exchange.method != "GET":
            log.info("%s %s with a key of role %s", exchange.method, exchange.path.decode("latin-1"), role)
        await exchange.respond(200, [JSON_TYPE], msgspec.json.encode(answer))

    async def _attempt(self, exchange: Exchange, attempt_id: str, what: bytes | None, role: Role, body: bytes) -> Any:
        if exchange.method == "POST" and what == b"rewards":
            return await self._feedback.from_grader(attempt_id, role, body)
        if exchange.method == "POST" and what == b"seal":
            return await self._attempts.seal(attempt_id)
        if exchange.method != "GET" or what == b"seal":
            raise _no_route(exchange)
        if what is None:
            return await self._attempts.state(attempt_id)
        if what == b"rewards":
            found = [as_json(reward) for reward in await asyncio.to_thread(self._store.rewards, attempt_id)]
        else:
            found = [_call(call) for call in await asyncio.to_thread(self._store.calls, attempt_id)]
        if not found:
            await self._attempts.state(attempt_id)  # raises where there is no such attempt
        return found

    def _stats(self) -> Json:
        state = {
            "in_flight": self._admission.in_flight,
            "paused": self._admission.paused,
            "policy_version": self._admission.version,
        }
        return state | self._counters.snapshot()


def _roles_for(route: tuple[str, bytes], attempt: re.Match[bytes] | None) -> frozenset[Role]:
    method, path = route
    if attempt is not None and method != "GET":
        return GRADE if attempt[2] == b"rewards" else TRAIN
    if attempt is not None:
        return READ
    return READ if path == b"/admin/stats" else TRAIN


def _attempt_id(segment: bytes) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise RequestError("The attempt's id is not valid UTF-8.") from None


def _call(call: Call) -> Json:
    """What a grader has to see of a call."""
    return {
        "id": call.id,
        "seq": call.seq,
        "dialect": call.dialect,
        "model": call.model,
        "state": call.state,
        "status": call.status,
        "streamed": call.streamed,
        "fidelity": call.fidelity,
        "fidelity_reason": call.fidelity_reason,
        "continuation": call.continuation,
        "replica": call.replica,
        "retries": msgspec.to_builtins(call.retries),
        "started_at": call.started_at,
        "duration_s": call.duration_s,
        "error": call.error,
        "request": call.request.decode("utf-8", "replace"),
        "response": call.response.decode("utf-8", "replace"),
    }


def _no_route(exchange: Exchange) -> RequestError:
    return RequestError(f"There is no {exchange.method} {exchange.path.decode('latin-1')}.", status=404)


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"The request is not valid: {plain(error)}.") from None
