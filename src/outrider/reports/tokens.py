"""Token ids as pieces of text with the strength of their log-probs, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Tokenizer = Callable[[Sequence[int]], list[str]]
"""Turns ids into one string each."""

# Probabilities from which a token counts as surer; `strength` says how many of them it reaches.
BOUNDS = (0.05, 0.3, 0.7, 0.95)
_LOG_BOUNDS = (-2.996, -1.204, -0.357, -0.0513)


def strength(logprob: float) -> int:
    """0 for a token that was hardly expected to 4 for a near-certain one. NaN counts as 0."""
    return sum(logprob >= bound for bound in _LOG_BOUNDS)


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str] | None:
    """One string for each id, or None without a tokenizer that can tell."""
    if tokenizer is None or not len(ids):
        return None
    try:
        found = tokenizer([int(i) for i in ids])
    except Exception:  # a tokenizer that does not fit the run must not hide the rest of what there is to see
        return None
    return found if len(found) == len(ids) else None
