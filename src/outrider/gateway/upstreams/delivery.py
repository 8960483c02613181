"""One call's way upstream: admitted, sent to a replica, and sent again where that is safe.

A call is sent again only while the agent has got no byte of an answer. What came of an earlier sending is thrown away
unread, so that a call has one answer, which is recorded once, with a list of what was tried before.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from outrider.gateway.admission import Admission, Refused
from outrider.gateway.exchange import ClientGone, Exchange, Headers
from outrider.gateway.upstreams.errors import UpstreamError
from outrider.gateway.upstreams.replicas import Replica, Replicas
from outrider.gateway.upstreams.retry import (
    NEVER_SENT,
    RATE_LIMITED,
    RETRIED_CODES,
    RETRIED_STATUSES,
    RetryPolicy,
    forbids_retry,
    retry_after,
)
from outrider.gateway.upstreams.upstream import UpstreamCall
from outrider.types import Retry


class Outgoing(NamedTuple):
    """What is sent; `target` is path and query."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


_SETTLED = Outgoing("", b"", [], b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What all deliveries of a gateway share."""

    replicas: Replicas
    admission: Admission
    policy: RetryPolicy
    total_s: float
    max_answer_bytes: int
    """Of an answer that is held; one that passes through may have any size."""


class Delivery:
    """`close` must follow. Raises `UpstreamError` where no answer comes, `Refused` and `ClientGone` as admission does.

    `pin` names the rollout, if there is one. Without `repeatable`, a call is sent again only if no replica can have got
    it: what passes through may be no model call. An answer that is `held` has a limit. `on_send` is called before each
    sending.
    """

    __slots__ = (
        "_admitted", "_began", "_call", "_exchange", "_on_send", "_outgoing", "_pin", "_repeatable", "_replica",
        "_route", "_sent_at", "_tried", "_waited_s", "max_answer_bytes", "retries",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        exchange: Exchange,
        outgoing: Outgoing,
        *,
        pin: str = "",
        repeatable: bool = True,
        held: bool = True,
        on_send: Callable[[], None] | None = None,
    ) -> None:
        self.retries: list[Retry] = []
        self.max_answer_bytes = route.max_answer_bytes if held else math.inf
        self._route = route
        self._exchange = exchange
        self._outgoing = outgoing
        self._pin = pin
        self._repeatable = repeatable
        self._on_send = on_send
        self._call: UpstreamCall | None = None
        self._replica: Replica | None = None
        self._tried: list[Replica] = []
        self._admitted = False
        self._waited_s = 0.0
        self._began = 0.0
        self._sent_at = 0.0

    async def start(self) -> UpstreamCall:
        """Returns when an answer has begun: it may have any status."""
        await self._enter()
        self._began = time.monotonic()
        return await self._until_answered()

    async def again(self, error: UpstreamError) -> UpstreamCall:
        """The answer that had begun broke off before the agent got anything of it. Raises `error` where no other is to
        be had."""
        await self._retry_or_raise(error)
        return await self._until_answered()

    def settle(self) -> None:
        """It will not be sent again, so what was sent need not be kept."""
        self._outgoing = _SETTLED

    def abort(self) -> None:
        """Give it up at once."""
        if self._call is not None:
            self._call.abort()

    def close(self) -> None:
        self.abort()
        self._leave()

    async def _until_answered(self) -> UpstreamCall:
        while True:
            call = self._next()
            try:
                await call.start()
            except UpstreamError as error:
                await self._retry_or_raise(error)
                continue
            if call.status not in RETRIED_STATUSES or not await self._retry_status(call):
                return call

    def _next(self) -> UpstreamCall:
        """The next sending, to be started. Raises `ClientGone`, and `UpstreamError` where no replica is up."""
        route = self._route
        if self._exchange.gone:
            raise ClientGone
        if self._on_send is not None:
            self._on_send()
        replica = route.replicas.choose(self._pin, self._tried)
        if replica is None:
            raise self._nobody()
        self._sent_at = time.monotonic()
        self._replica = replica
        replica.calls += 1
        left_s = route.total_s - (self._sent_at - self._began)
        self._call = replica.upstream.call(*self._outgoing, within_s=left_s, max_bytes=self.max_answer_bytes)
        return self._call

    @property
    def replica(self) -> str:
        """The one it was sent to last; empty before."""
        return "" if self._replica is None else self._replica.name

    # -- sending again ---------------------------------------------------------------------------------------------

    async def _retry_or_raise(self, error: UpstreamError) -> None:
        may = RETRIED_CODES if self._repeatable else NEVER_SENT
        replica = self._replica
        if error.code in may and not self._exchange.gone and replica is not None:
            self._tried.append(replica)
            # One that did not begin in time has too much to do already; asking again would make it worse.
            overloaded = error.code == "upstream_first_byte_timeout" and not self._elsewhere()
            if not overloaded and await self._retry(replica, 0, str(error), None):
                return
            if not self._route.replicas.any_up:
                raise self._nobody() from error
        raise error

    async def _retry_status(self, call: UpstreamCall) -> bool:
        replica = self._replica
        if not self._repeatable or forbids_retry(call.headers) or replica is None:
            return False
        if call.status != RATE_LIMITED:
            self._tried.append(replica)
        return await self._retry(replica, call.status, f"status {call.status}", retry_after(call.headers))

    async def _retry(self, replica: Replica, status: int, error: str, retry_after_s: float | None) -> bool:
        """Wait until it may be sent again after `replica`; false where it may not, and then the last outcome stands."""
        ended_at = time.monotonic()
        if not self._route.replicas.any_up:
            return False
        elsewhere = self._elsewhere()
        if elsewhere:
            retry_after_s = None  # what one replica asks for says nothing about another
        wait_s = self._route.policy.wait(len(self.retries), self._waited_s, retry_after_s)
        if elsewhere and wait_s is not None:
            wait_s = 0.0
        if wait_s is None or ended_at + wait_s >= self._began + self._route.total_s:
            return False
        self._leave()  # new weights need not wait for us, and version and replica are those of the next sending
        await self._exchange.unless_gone(asyncio.sleep(wait_s))
        try:
            await self._enter()
        except Refused:
            return False
        self.abort()
        replica.retries += 1
        waited_s = time.monotonic() - ended_at
        self._waited_s += waited_s
        self.retries.append(
            Retry(
                replica=replica.name,
                status=status,
                error=error,
                duration_s=ended_at - self._sent_at,
                wait_s=waited_s,
            )
        )
        return True

    def _elsewhere(self) -> bool:
        """Another replica is up that was not tried."""
        return bool(self._tried) and self._route.replicas.has_other(self._tried)

    def _nobody(self) -> UpstreamError:
        replicas = self._route.replicas
        problem = f"no replica is up ({replicas.why()})"
        return UpstreamError("upstream_unavailable", problem, retry_after_s=replicas.retry_after_s)

    # -- admission -------------------------------------------------------------------------------------------------

    async def _enter(self) -> None:
        await self._route.admission.enter(self._exchange)
        self._admitted = True

    def _leave(self) -> None:
        if self._admitted:
            self._admitted = False
            self._route.admission.leave()
