"""What those who run a gateway ask of it, and what it tells them.

GET /health   200 while the process lives
GET /ready    200 while it should be sent calls, else 503 and why
GET /metrics  Prometheus' text format; with the key of a reader, where there is any key
"""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from outrider.errors import RequestError
from outrider.gateway.admission import Admission
from outrider.gateway.exchange import JSON_TYPE, Exchange
from outrider.gateway.fleet import Fleet
from outrider.gateway.limits import Limits
from outrider.gateway.options import GatewayOptions
from outrider.gateway.readiness import Readiness
from outrider.gateway.roles import READ, Roles
from outrider.gateway.sessions import token_of
from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.logs import CallLog, LogWriter
from outrider.gateway.telemetry.note import Note, Observer
from outrider.gateway.telemetry.prometheus import CONTENT_TYPE, Gauges, Metrics
from outrider.gateway.telemetry.tracing import Tracer, is_configured
from outrider.gateway.upstreams.replicas import Replicas
from outrider.protocols import Store

DRAIN_POLL_S = 0.05
ROUTES = frozenset({b"/health", b"/ready", b"/metrics"})


class Operations:
    """Lives on one event loop. Raises `SetupError` where traces are asked for and can't be had."""

    def __init__(
        self,
        options: GatewayOptions,
        store: Store,
        *,
        replicas: Replicas,
        admission: Admission,
        limits: Limits,
        counters: Counters,
        roles: Roles,
        log: LogWriter | None,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._admission = admission
        self._limits = limits
        self._counters = counters
        self._roles = roles
        self._drain_timeout_s = options.drain_timeout_s
        self._readiness = Readiness(store, lambda: replicas.any_up)
        self.fleet = Fleet(store, admission) if store.remote else None
        if self.fleet is not None:
            admission.confirm = self.fleet.confirm
        self._metrics = Metrics()
        self._log = log
        self._tracer = Tracer() if is_configured(os.environ) else None
        self.observers: list[Observer] = [self._metrics]
        if log is not None and options.log_level != "off":
            self.observers.append(CallLog(log, level=options.log_level, format=options.log_format))
        if self._tracer is not None:
            self.observers.append(self._tracer)

    @property
    def draining(self) -> bool:
        return self._readiness.draining

    def begin(self) -> None:
        """Take part in what several gateways do together, and look after the replicas. On the event loop."""
        self._replicas.watch()
        if self.fleet is not None:
            self.fleet.join()

    def ended(self, note: Note, status: int) -> None:
        note.end(status)
        for observer in self.observers:
            observer.ended(note)

    async def drain(self) -> bool:
        """Take no new call and wait for those under way; returns whether all have ended in time."""
        self._readiness.draining = True
        deadline = time.monotonic() + self._drain_timeout_s
        while self._limits.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self._limits.in_flight

    async def close(self) -> None:
        if self.fleet is not None:
            await self.fleet.leave()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    # -- routes ----------------------------------------------------------------------------------------------------

    async def answer(self, exchange: Exchange) -> None:
        """One of `ROUTES`. Raises `RequestError`."""
        if exchange.method not in ("GET", "HEAD"):
            path = exchange.path.decode()
            raise RequestError(f"{path} takes GET only.", status=405, code="method_not_allowed")
        if exchange.path == b"/metrics":
            if self._roles.any:
                self._roles.allow(token_of(exchange.header(b"authorization") or b""), READ)
            body = self._metrics.render(self._counters.snapshot(), self._gauges())
            await exchange.respond(200, [(b"content-type", CONTENT_TYPE)], body)
        elif exchange.path == b"/ready":
            problems = await self._readiness.problems()
            state = {"ready": not problems, "problems": problems}
            await exchange.respond(503 if problems else 200, [JSON_TYPE], msgspec.json.encode(state))
        else:
            state = {
                "status": "ok",
                "paused": self._admission.paused,
                "draining": self.draining,
                "in_flight": self._admission.in_flight,
                "policy_version": self._admission.version,
            }
            await exchange.respond(200, [JSON_TYPE], msgspec.json.encode(state))

    def _gauges(self) -> Gauges:
        return Gauges(
            in_flight=self._limits.in_flight,
            upstream_in_flight=self._admission.in_flight,
            store_queue=self._store.pending,
            paused=self._admission.paused,
            draining=self.draining,
            policy_version=self._admission.version,
            log_lines_lost=self._log.lost if self._log is not None else 0,
            upstreams=self._replicas.states(),
        )
