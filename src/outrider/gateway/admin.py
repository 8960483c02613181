"""The trainer's side of the gateway: ``/admin/pause``, ``/admin/resume``, ``/admin/stats``. JSON in, JSON out."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec

from outrider.errors import RequestError
from outrider.gateway.admission import Admission
from outrider.gateway.counters import Counters
from outrider.gateway.exchange import JSON_TYPE, Exchange
from outrider.protocols import Store
from outrider.types import Json

MAX_BODY_BYTES = 1 << 16


class _Pause(msgspec.Struct, forbid_unknown_fields=True):
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0


class _Resume(msgspec.Struct, forbid_unknown_fields=True):
    version: Annotated[int, msgspec.Meta(ge=0)]


class Admin:
    """Guarded by the admin key; with an empty one nobody is let in."""

    def __init__(self, admin_key: str, admission: Admission, store: Store, counters: Counters) -> None:
        self._admin_key = admin_key.encode()
        self._admission = admission
        self._store = store
        self._counters = counters
        self._routes: dict[tuple[str, bytes], Callable[[bytes], Awaitable[Json]]] = {
            ("POST", b"/admin/pause"): self._pause,
            ("POST", b"/admin/resume"): self._resume,
            ("GET", b"/admin/stats"): self._stats,
        }

    async def handle(self, exchange: Exchange) -> None:
        """Raises `RequestError`."""
        given = (exchange.header(b"authorization") or b"").removeprefix(b"Bearer ")
        if not self._admin_key or not hmac.compare_digest(given, self._admin_key):
            raise RequestError("This needs the admin key.", status=401, code="invalid_admin_key")
        route = self._routes.get((exchange.method, exchange.path))
        if route is None:
            raise RequestError(f"There is no {exchange.method} {exchange.path.decode('latin-1')}.", status=404)
        answer = await route(await exchange.body(MAX_BODY_BYTES))
        await exchange.respond(200, [JSON_TYPE], msgspec.json.encode(answer))

    async def _pause(self, body: bytes) -> Json:
        wanted = _decode(body, _Pause)
        return {"in_flight": await self._admission.pause(wanted.timeout_s)}

    async def _resume(self, body: bytes) -> Json:
        wanted = _decode(body, _Resume)
        await self._admission.resume(wanted.version, self._store.set_value)
        return {"policy_version": wanted.version}

    async def _stats(self, body: bytes) -> Json:
        state = {
            "in_flight": self._admission.in_flight,
            "paused": self._admission.paused,
            "policy_version": self._admission.version,
        }
        return state | self._counters.snapshot()


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"The request is not valid: {error}.") from None
