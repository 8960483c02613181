from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.backends.packing import common_prefix, pack

rows_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=0, max_size=8)


def arrays(rows):
    return [np.array(row, dtype=np.int32) for row in rows]


@given(rows=rows_of, budget=st.integers(1, 40), share=st.booleans())
def test_every_path_spells_its_row_and_shared_nodes_are_there_once(rows, budget, share):
    packs = pack(arrays(rows), token_budget=budget, share_prefixes=share)
    assert sorted(row for made in packs for row in made.rows) == list(range(len(rows)))
    for made in packs:
        ids = np.concatenate(made.token_ids)
        positions = np.concatenate(made.positions)
        assert len(ids) == len(positions) == made.size
        assert made.size <= budget or len(made.rows) == 1
        for row, path in zip(made.rows, made.paths, strict=True):
            assert ids[path].tolist() == rows[row]
            assert positions[path].tolist() == list(range(len(rows[row])))
        members = [rows[row] for row in made.rows]
        if share:
            assert made.size == len({tuple(row[:end]) for row in members for end in range(1, len(row) + 1)})
        else:
            assert made.size == sum(map(len, members))
        # Chains cover the nodes in order, and each ends the path it names.
        assert [node for chain in made.chains for node in range(chain.start, chain.stop)] == list(range(made.size))
        for chain in made.chains:
            assert chain.path[len(chain.path) - chain.stop + chain.start :].tolist() == list(
                range(chain.start, chain.stop)
            )


def test_a_prefix_shared_across_a_cut_is_computed_on_both_sides():
    rows = arrays([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]])
    packs = pack(rows, token_budget=5, share_prefixes=True)
    assert sorted(made.size for made in packs) == [4, 5]
    assert [made.recomputed for made in packs] == [0, 3]


def trie(rows):
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=7),
    budget=st.integers(1, 25),
)
def test_the_trie_is_cut_where_it_costs_least(rows, budget):
    packs = pack(arrays(rows), token_budget=budget, share_prefixes=True)
    computed = sum(made.size for made in packs)
    assert sum(made.recomputed for made in packs) == computed - trie(rows)
    ordered = sorted(rows)
    ways = []
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):  # every way to cut the sorted rows into runs
        bounds = [0, *(place for place, cut in enumerate(cuts, 1) if cut), len(rows)]
        runs = [ordered[start:stop] for start, stop in itertools.pairwise(bounds)]
        if all(trie(run) <= budget or len(run) == 1 for run in runs):
            ways.append((sum(map(trie, runs)), len(runs)))
    assert (computed, len(packs)) == min(ways)


def test_common_prefix():
    one, other = arrays([[1, 2, 3], [1, 2]])
    assert common_prefix(one, other) == common_prefix(other, one) == 2
    assert common_prefix(one, one) == 3
    assert common_prefix(one, one[:0]) == 0
