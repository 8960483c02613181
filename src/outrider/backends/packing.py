"""Rows into micro-batches, in which a prefix that several rows share is there once.

A micro-batch is a trie over token ids, laid out as one sequence of N nodes. Sorted by their ids, rows that share a
prefix are neighbours, so each row adds a **chain**: the nodes after what it has in common with the row before. A node
attends to its ancestors and itself, that is, to a prefix of its row's path, exactly as if the row were alone.

    row 0   p p p A A     nodes 0 1 2 3 4    chain 0..4, path 0 1 2 3 4
    row 1   p p p B       node  5            chain 5..5, path 0 1 2 5

Without sharing the chains are whole rows, and everything else stays the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from outrider.types import IntArray

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Consecutive nodes ``start..stop`` of the sequence, which continue the first nodes of `path`."""

    start: int
    stop: int
    path: Index
    """Nodes from the root to the last node of the chain; its last ``stop - start`` are the chain itself."""


@dataclass(slots=True, kw_only=True)
class Pack:
    """One micro-batch."""

    token_ids: list[IntArray] = field(default_factory=list)
    positions: list[Index] = field(default_factory=list)
    chains: list[Chain] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Which of the given rows are in it."""
    paths: list[Index] = field(default_factory=list)
    """For each of `rows` the node of each of its tokens."""
    size: int = 0
    """N, the number of nodes: positions that go through the model."""
    recomputed: int = 0
    """Of these the ones that an earlier pack has too, since the trie was cut here."""

    def add(self, row: int, ids: IntArray, shared: int) -> None:
        """Append a row whose first `shared` ids are those of the row added before."""
        new = len(ids) - shared
        head = self.paths[-1][:shared] if shared else np.empty(0, dtype=np.int64)
        path = np.concatenate([head, np.arange(self.size, self.size + new)])
        if new:
            self.token_ids.append(ids[shared:])
            self.positions.append(np.arange(shared, len(ids)))
            self.chains.append(Chain(start=self.size, stop=self.size + new, path=path))
        self.rows.append(row)
        self.paths.append(path)
        self.size += new


def pack(rows: Sequence[IntArray], *, token_budget: int, share_prefixes: bool) -> list[Pack]:
    """Split `rows` into micro-batches of at most `token_budget` nodes.

    A row is never split: one that is longer than the budget gets a micro-batch of its own. A prefix that is shared
    across a cut is computed on both sides; the trie is cut where that costs least.
    """
    # Big-endian bytes of ids that are not negative sort as the ids do.
    order = sorted(range(len(rows)), key=lambda row: rows[row].astype(">i4").tobytes())
    shared = [0] * len(rows)
    if share_prefixes:
        shared[1:] = [common_prefix(rows[one], rows[other]) for one, other in itertools.pairwise(order)]
    packs: list[Pack] = []
    for start, stop in _cut([len(rows[row]) for row in order], shared, token_budget):
        packs.append(Pack(recomputed=shared[start]))
        for place in range(start, stop):
            packs[-1].add(order[place], rows[order[place]], shared[place] if place > start else 0)
    return packs


def _cut(lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cut rows in sorted order into runs of at most `budget` nodes: least tokens computed twice, then fewest runs.

    ``shared[i]`` is what row i has in common with the row before it, which is what a cut before i costs.
    """
    best: list[tuple[int, int]] = [(0, 0)]  # for the rows before each place: tokens computed twice, runs
    begins: list[int] = []  # where the last run of that best way begins
    for stop in range(1, len(lengths) + 1):
        size, ways = 0, []
        for start in range(stop - 1, -1, -1):
            size += lengths[start] - (shared[start + 1] if start + 1 < stop else 0)
            if size > budget and start < stop - 1:
                break  # a longer run is never smaller
            twice, runs = best[start]
            ways.append((twice + shared[start], runs + 1, start))
        twice, runs, begin = min(ways)
        best.append((twice, runs))
        begins.append(begin)
    cuts: list[tuple[int, int]] = []
    stop = len(lengths)
    while stop:
        cuts.append((begins[stop - 1], stop))
        stop = begins[stop - 1]
    return cuts[::-1]


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
