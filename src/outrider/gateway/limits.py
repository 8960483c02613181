"""How much one gateway takes at a time, and one caller in a second."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Self

from outrider.errors import RequestError
from outrider.gateway.admission import Refused

SMALL_BODY = 1 << 20  # bytes; smaller ones always find room, so that nobody's large ones keep them out
MAX_CALLERS = 10_000  # buckets that are kept; an older one is full again by the time it is dropped


class TooFast(RequestError):
    """One caller's calls come too fast."""

    def __init__(self, rate: float, retry_after_s: int) -> None:
        super().__init__(f"More than {rate:g} calls per second with this key.", status=429, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class Limits:
    """A context manager around each call that is under way. `take` counts it against its caller's rate."""

    def __init__(self, *, max_in_flight: int, rate_per_key: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight = 0
        self._max_in_flight = max_in_flight
        self._rate = rate_per_key
        self._burst = max(1.0, rate_per_key)  # what a caller may do at once after a rest of a second
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Calls that are left to a caller, and when that was."""

    def __enter__(self) -> Self:
        """Raises `Refused`."""
        if self.in_flight >= self._max_in_flight:
            raise Refused("Too many calls are under way.", code="too_many_in_flight", retry_after_s=1)
        self.in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.in_flight -= 1

    def take(self, caller: str) -> None:
        """One more call of `caller`. Raises `TooFast`."""
        if not self._rate:
            return
        now = self._clock()
        left, since = self._buckets.pop(caller, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        if left < 1:
            self._buckets[caller] = (left, now)
            raise TooFast(self._rate, max(1, math.ceil((1 - left) / self._rate)))
        self._buckets[caller] = (left - 1, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)


class Room:
    """Memory for the request bodies of all calls under way, up to `limit` bytes; what is over that has to wait."""

    def __init__(self, limit: int) -> None:
        self.held = 0
        self._limit = limit

    def take(self, size: int, of: int) -> None:
        """`size` more bytes of a body that has `of` by now. Raises `Refused`."""
        if of > SMALL_BODY and self.held + size > self._limit:
            raise Refused("Too many large requests are under way.", code="too_many_in_flight", retry_after_s=2)
        self.held += size

    def give_back(self, size: int) -> None:
        self.held -= size
