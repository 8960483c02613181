"""A clock that leaps, for what would take too long, or would be reached by itself on a machine that stands still."""

from __future__ import annotations

import time


class LeapingClock:
    """Real time, and what was leapt over besides. Put in the place of the module `time` where a module imports it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def time(self) -> float:
        return time.time() + self._ahead_s
