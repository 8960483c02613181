"""When a call is sent again, and after how long a wait."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from outrider.gateway.upstreams.errors import Code

# Said by whoever is overloaded or on the way: the model has not answered. 529 is Anthropic's "overloaded".
RETRIED_STATUSES = frozenset({429, 502, 503, 504, 529})
RATE_LIMITED = 429  # of the account, so another replica would say the same
RETRIED_CODES: frozenset[Code] = frozenset(
    {"upstream_unreachable", "upstream_connect_timeout", "upstream_first_byte_timeout", "upstream_cut"}
)
NEVER_SENT: frozenset[Code] = frozenset({"upstream_unreachable", "upstream_connect_timeout"})

BASE_S = 0.5
CAP_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """At most `retries` further sendings, and no more than `budget_s` seconds of waits between them, together.

    Waits are drawn evenly from 0 to ``BASE_S * 2**n``, at most `CAP_S` ("full jitter"; Brooker, "Exponential Backoff
    And Jitter", AWS Architecture Blog 2015). An upstream that says itself how long to wait is obeyed, with a little
    jitter on top, so that not everybody comes back in the same moment.
    """

    retries: int
    budget_s: float
    draw: Callable[[float, float], float] = random.uniform

    def wait(self, number: int, spent_s: float, retry_after_s: float | None) -> float | None:
        """Seconds before retry `number` (from 0), after waits of `spent_s` in all; None for no further one."""
        if number >= self.retries:
            return None
        if retry_after_s is None:
            wait_s = self.draw(0.0, min(CAP_S, BASE_S * 2.0**number))
        else:
            wait_s = retry_after_s + self.draw(0.0, BASE_S)
        return wait_s if spent_s + wait_s <= self.budget_s else None


def retry_after(headers: Sequence[tuple[bytes, bytes]]) -> float | None:
    """Seconds that an answer asks us to wait: ``retry-after-ms``, or ``retry-after`` in seconds or as a date.

    A date is compared with the answer's own `Date`, where it has one: clocks of two machines differ. None where nothing
    is said, or nothing that can be read.
    """
    found = {name: value.decode("latin-1").strip() for name, value in headers if name in _NAMES}
    with contextlib.suppress(KeyError, ValueError):
        return _seconds(float(found[b"retry-after-ms"]) / 1000)
    said = found.get(b"retry-after", "")
    with contextlib.suppress(ValueError):
        return _seconds(float(said))
    until = _date(said)
    if until is None:
        return None
    now = _date(found.get(b"date", "")) or datetime.fromtimestamp(time.time(), UTC)
    return max(0.0, (until - now).total_seconds())


def forbids_retry(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """The upstream says that sending it again would not help; OpenAI's and Anthropic's clients obey this header."""
    return any(name == b"x-should-retry" and value.strip().lower() == b"false" for name, value in headers)


_NAMES = frozenset({b"retry-after", b"retry-after-ms", b"date"})


def _seconds(value: float) -> float:
    if not 0 <= value < 1e9:  # also no NaN
        raise ValueError(value)
    return value


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, IndexError, TypeError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
