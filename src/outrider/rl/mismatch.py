"""When trainer and engine disagree too much: the check behind `train.stop_on_mismatch`.

The two compute the same log-prob by different code, so a small difference is normal and hardly changes over a run. A
jump means that something broke: weights that were not swapped, a tokenizer or template that differs, a wrong
temperature. Training goes on without an error then, and unlearns; so it is worth stopping for.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

HISTORY = 16
"""Steps that the running median looks back."""
SETTLED = 3
"""Steps needed before a median says what is usual."""


def alarm(history: Sequence[float], now: float, *, limit: float = 0.0, jump: float = 0.0) -> str:
    """Why the run should stop, or an empty string.

    `history` holds the mean absolute log-prob difference of earlier steps, oldest first, `now` that of this step before
    its first update, nats a token. `limit` is absolute; `jump` is a multiple of the running median; 0 turns either off.
    """
    if limit and not now <= limit:  # a NaN is no agreement either
        return f"engine and trainer disagree by {now:.3g} nats a token on the mean; train.stop_on_mismatch is {limit:g}"
    usual = list(history)[-HISTORY:]
    if jump and len(usual) >= SETTLED and not now <= jump * median(usual):
        return (
            f"engine and trainer disagree by {now:.3g} nats a token on the mean; the median of the last {len(usual)} "
            f"steps is {median(usual):.3g}, and train.stop_on_mismatch_jump allows {jump:g} times that"
        )
    return ""
