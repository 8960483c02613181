"""What one step computes: some tokens of some sequences, and how attention is cut into dense pieces.

Tokens of all sequences lie flat in one row, so that linear layers see no padding. For attention, sequences in
neighbouring slots form a `Span`, a dense view of the cache. Spans are chosen so that little is computed in vain: a
long and a short sequence are kept apart, and sequences that begin alike are kept together, since what they have in
common is then read once for all of them (Juravsky et al. 2024, "Hydragen").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPAN_COST = 512
"""What one more span costs, in keys: about the time attention takes for so many keys of one sequence."""
SHARED_MIN = 32
"""A shorter common beginning is not worth the extra matrix products."""
REPLAN_STEPS = 32
"""Sequences grow as they run, so the cut is made anew from time to time."""
MASKED = -1e30
"""Finite, so that a row with every key masked gives a number and not NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The next tokens of one sequence: `tokens` go to positions ``start ..`` of `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]
    wants_logits: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """R neighbouring slots with up to T new tokens each, which see keys ``0 .. length``."""

    first: int
    """Index of its first token in the flat row."""
    tokens: int
    slot: int
    slots: int
    """R."""
    width: int
    """T."""
    length: int
    shared: int
    """All R sequences have this many first tokens in common, before any new one; read from the first slot."""
    grid: Tensor | None
    """Where each token goes in the (R * T) grid; None where tokens fill it in order."""
    mask: Tensor
    """Added to scores: float32 (R, T, length - shared)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """N tokens of one step."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    """Indices of the tokens whose logits are wanted."""
    spans: tuple[Span, ...]


class Planner:
    """Lays out steps, and keeps the cut into spans while the same sequences go on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shape: list[tuple[int, int]] = []
        self._runs: list[tuple[int, int]] = []
        self._age = 0

    def __call__(self, work: Sequence[Work], common: Sequence[int]) -> Batch:
        """The batch of `work`, as `build` takes it."""
        shape = [(item.slot, len(item.tokens)) for item in work]
        self._age += 1
        if shape != self._shape or self._age >= REPLAN_STEPS:
            self._shape, self._runs, self._age = shape, plan(work, common), 0
        return build(work, common, self._runs, self._device)


def build(work: Sequence[Work], common: Sequence[int], runs: Sequence[tuple[int, int]], device: torch.device) -> Batch:
    """Lay out a step whose `work` is cut into `runs`; within a run it is sorted by slot.

    ``common[i]`` counts the tokens that items i and i+1 begin with alike.
    """
    slots = [item.slot for item in work for _ in item.tokens]
    positions = [position for item in work for position in range(item.start, item.end)]
    tokens = [token for item in work for token in item.tokens]
    rows: list[int] = []
    at = 0
    firsts = []
    for item in work:
        firsts.append(at)
        at += len(item.tokens)
        if item.wants_logits:
            rows.append(at - 1)
    spans = [_span(work[a:b], firsts[a], common[a : b - 1], device) for a, b in runs]
    return Batch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        rows=torch.tensor(rows, dtype=torch.long, device=device),
        spans=tuple(spans),
    )


def plan(work: Sequence[Work], common: Sequence[int]) -> list[tuple[int, int]]:
    """Cut `work` into runs ``[a, b)`` of ascending slots at the least cost, by dynamic programming over their ends."""
    best = [0.0]
    cut = [0]
    for b in range(1, len(work) + 1):
        least, where = float("inf"), b - 1
        length = width = 0
        shared = 1 << 30
        for a in range(b - 1, -1, -1):
            item = work[a]
            if a < b - 1 and item.slot >= work[a + 1].slot:
                break  # a span is an ascending stretch of slots
            length, width = max(length, item.end), max(width, len(item.tokens))
            shared = min(shared, item.start)
            if a < b - 1:
                shared = min(shared, common[a])
            count = work[b - 1].slot - item.slot + 1
            saved = shared if width == 1 and b - a > 1 and shared >= SHARED_MIN else 0
            cost = best[a] + SPAN_COST + count * width * (length - saved) + saved
            if cost < least:
                least, where = cost, a
        best.append(least)
        cut.append(where)
    runs = []
    b = len(work)
    while b:
        runs.append((cut[b], b))
        b = cut[b]
    return runs[::-1]


def _span(work: Sequence[Work], first: int, common: Sequence[int], device: torch.device) -> Span:
    slot, count = work[0].slot, work[-1].slot - work[0].slot + 1
    width = max(len(item.tokens) for item in work)
    length = max(item.end for item in work)
    shared = min([*common, *(item.start for item in work)]) if width == 1 and len(work) > 1 else 0
    shared = shared if shared >= SHARED_MIN else 0
    starts = [0] * count
    for item in work:
        starts[item.slot - slot] = item.start
    last_key = torch.tensor(starts, device=device)[:, None, None] + torch.arange(width, device=device)[:, None]
    mask = torch.zeros(count, width, length - shared, device=device)
    mask.masked_fill_(torch.arange(shared, length, device=device) > last_key, MASKED)
    places = [(item.slot - slot) * width + t for item in work for t in range(len(item.tokens))]
    full = len(places) == count * width
    return Span(
        first=first,
        tokens=len(places),
        slot=slot,
        slots=count,
        width=width,
        length=length,
        shared=shared,
        grid=None if full else torch.tensor(places, device=device),
        mask=mask,
    )
