"""Who may go upstream now: the pause around a publish, the calls in flight, the policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outrider.errors import RequestError
from outrider.gateway.exchange import Exchange
from outrider.protocols import Store

VERSION_KEY = "policy_version"


def stored_version(store: Store) -> int | None:
    """The policy version of the last resume; none where the upstream's weights are not ours. Raises `StoreError`."""
    text = store.value(VERSION_KEY)
    return None if text is None else int(text)


class Refused(RequestError):
    """Come back in `retry_after_s` seconds."""

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message, status=503, code=code)
        self.retry_after_s = retry_after_s


class Admission:
    """Counts calls in flight and holds new ones back while weights are swapped. Lives on one event loop.

    `version` counts successful publishes: it changes in `resume` and nowhere else, so that a failed publish leaves it.
    """

    def __init__(self, *, version: int | None, wait_s: float) -> None:
        self.version = version
        self.in_flight = 0
        self._wait_s = wait_s
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._watching: set[Callable[[int | None], None]] = set()
        self.confirm: Callable[[], Awaitable[None]] | None = None
        """Asked before a call is admitted, where a pause may have been told to somebody else."""

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def enter(self, exchange: Exchange) -> None:
        """Wait until calls are admitted; `leave` must follow. Raises `Refused` after `wait_s`, and `ClientGone`."""
        if self.confirm is not None:
            await self.confirm()
        while self.paused:
            await exchange.unless_gone(self._wait())
        self.in_flight += 1
        self._idle.clear()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._open.wait()
        except TimeoutError:
            raise Refused("New weights are being loaded; try again.", code="paused", retry_after_s=1) from None

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def hold(self) -> None:
        """Admit nobody."""
        self._open.clear()

    def admit(self, version: int | None) -> None:
        """Admit everybody, and record their calls under `version`."""
        if version != self.version:
            for tell in self._watching:
                tell(self.version)
            self.version = version
        self._open.set()

    def watch(self, on_change: Callable[[int | None], None]) -> None:
        """Call `on_change` with the version until then when another one takes its place; until `unwatch`."""
        self._watching.add(on_change)

    def unwatch(self, on_change: Callable[[int | None], None]) -> None:
        self._watching.discard(on_change)

    async def pause(self, timeout_s: float) -> int:
        """Admit nobody and wait until calls in flight have ended; returns how many have not after `timeout_s`."""
        self.hold()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        return self.in_flight

    async def resume(self, version: int | None, persist: Callable[[str, str], None]) -> None:
        """Record later calls under `version` and admit them. `persist` writes it first, so that a restart knows it."""
        if version is not None:
            await asyncio.to_thread(persist, VERSION_KEY, str(version))
        self.admit(version)
