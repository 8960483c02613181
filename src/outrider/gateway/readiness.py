"""Whether this gateway should be sent calls: its store takes writes, an upstream is up, and it does not end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from outrider.errors import StoreError
from outrider.protocols import Store

PROBE_KEY = "gateway_probe"
PROBE_TIMEOUT_S = 2.0
FRESH_S = 1.0  # how long an answer of the store holds


class Readiness:
    """Lives on one event loop. `any_up` says whether an upstream is up."""

    def __init__(self, store: Store, any_up: Callable[[], bool]) -> None:
        self.draining = False
        self._store = store
        self._any_up = any_up
        self._probe: asyncio.Future[None] | None = None
        self._problem = ""
        self._looked_at = float("-inf")

    async def problems(self) -> list[str]:
        """Why it is not ready; nothing where it is."""
        found = ["draining"] if self.draining else []
        if not self._any_up():
            found.append("no upstream is up")
        store = await self._store_problem()
        return [*found, store] if store else found

    async def _store_problem(self) -> str:
        """What is wrong with a small write. One at a time: a stalled store is not asked again until it has answered."""
        if time.monotonic() - self._looked_at < FRESH_S:
            return self._problem
        if self._probe is None:
            self._probe = asyncio.ensure_future(
                asyncio.to_thread(self._store.set_value, PROBE_KEY, f"{time.time():.0f}")
            )
        done, _ = await asyncio.wait([self._probe], timeout=PROBE_TIMEOUT_S)
        if not done:
            return f"the store has not taken a write for {PROBE_TIMEOUT_S:g} s"
        probe, self._probe = self._probe, None
        error = probe.exception() if probe is not None else None
        if error is not None and not isinstance(error, StoreError):
            raise error
        self._problem = f"the store takes no writes: {error}" if error is not None else ""
        self._looked_at = time.monotonic()
        return self._problem
