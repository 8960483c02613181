"""Slots, the prefix pool, spans and attention over them, against plain definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import SHARED_MIN, Planner, Work, plan
from outrider.engines.embedded.kv import BLOCK, PrefixPool, Slots, block_keys

CPU = torch.device("cpu")


def make_slots(slots: int = 4, length: int = 128, heads: int = 2, dim: int = 8) -> Slots:
    return Slots(layers=2, slots=slots, heads=heads, length=length, dim=dim, dtype=torch.float32, device=CPU)


def tokens(*blocks: int, extra: int = 0) -> np.ndarray:
    """One block of equal tokens for each number, and some more."""
    return np.repeat(np.array([*blocks, 99], dtype=np.int32), [*[BLOCK] * len(blocks), extra])


def test_keys_depend_on_all_that_came_before():
    a, b = block_keys(tokens(1, 2, 3)), block_keys(tokens(5, 2, 3))
    assert len(a) == 3
    assert not set(a) & set(b)
    assert block_keys(tokens(1, 2, extra=BLOCK - 1)) == a[:2]


def test_fresh_slots_hold_zeros_in_aligned_memory():
    slots = make_slots()
    assert not slots.data.any()
    assert slots.data.data_ptr() % 64 == 0


def test_the_pool_gives_back_what_was_stored():
    slots = make_slots()
    pool = PrefixPool(slots, 4 * BLOCK)
    slots.data[:, :, 0] = torch.randn_like(slots.data[:, :, 0])
    keys = block_keys(tokens(1, 2, 3))
    pool.store(keys, 0)
    assert pool.match(block_keys(tokens(1, 2, 9))) == 2
    pool.restore(keys[:2], 3)
    assert torch.equal(slots.data[:, :, 3, :, : 2 * BLOCK], slots.data[:, :, 0, :, : 2 * BLOCK])
    assert not slots.data[:, :, 3, :, 2 * BLOCK :].any()


def test_a_full_pool_drops_the_end_of_the_oldest_chain_first():
    slots = make_slots()
    pool = PrefixPool(slots, 4 * BLOCK)
    old, new = block_keys(tokens(1, 2, 3)), block_keys(tokens(4, 5))
    pool.store(old, 0)
    pool.store(new, 1)
    assert (pool.match(old), pool.match(new), len(pool)) == (2, 2, 4)


def test_a_pool_of_no_size_keeps_nothing():
    pool = PrefixPool(make_slots(), 0)
    pool.store(block_keys(tokens(1)), 0)
    assert pool.match(block_keys(tokens(1))) == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=25), st.integers(0, 8))
def test_whatever_the_pool_says_it_has_is_right(chains, capacity):
    """Each block is filled with a number that follows from its key; all that matches must read back as that."""
    slots = make_slots()
    pool = PrefixPool(slots, capacity * BLOCK)
    for chain in chains:
        keys = block_keys(tokens(*chain))
        known = pool.match(keys)
        pool.restore(keys[:known], 1)
        for i, key in enumerate(keys):
            number = float(int.from_bytes(key[:2], "little"))
            if i < known:
                assert (slots.data[:, :, 1, :, i * BLOCK : (i + 1) * BLOCK] == number).all()
            slots.data[:, :, 0, :, i * BLOCK : (i + 1) * BLOCK] = number
        pool.store(keys, 0)
        assert pool.match(keys) == min(len(keys), capacity)
        assert len(pool) <= capacity


def reference_attention(cache: torch.Tensor, item: Work, q: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence, one query at a time. `cache` (key/value, slot, head, position, dim), `q` (T, heads, dim)."""
    group = q.shape[1] // cache.shape[2]
    out = torch.empty_like(q)
    for t in range(len(item.tokens)):
        for head in range(q.shape[1]):
            keys, values = cache[:, item.slot, head // group, : item.start + t + 1]
            out[t, head] = (keys @ q[t, head] * scale).softmax(-1) @ values
    return out


@st.composite
def steps(draw):
    """Work for a step over slots with holes: single tokens first, then pieces of prompts."""
    slots = draw(st.permutations(range(8)))[: draw(st.integers(1, 8))]
    singles = sorted(slots[: draw(st.integers(0, len(slots)))])
    pieces = sorted(set(slots) - set(singles))
    work = [Work(slot=s, start=draw(st.integers(0, 90)), tokens=[0], wants_logits=True) for s in singles]
    work += [
        Work(slot=s, start=draw(st.integers(0, 60)), tokens=[0] * draw(st.integers(2, 9)), wants_logits=False)
        for s in pieces
    ]
    common = [draw(st.sampled_from([0, 10, SHARED_MIN, 50, 200])) for _ in work[1:]]
    return work, common


@settings(max_examples=40, deadline=None)
@given(steps(), st.sampled_from([1, 3]), st.integers(0, 2**31))
def test_attention_over_any_layout_is_attention(step, group, seed):
    work, common = step
    slots = make_slots(slots=8)
    source = torch.Generator().manual_seed(seed)
    slots.data[0] = torch.randn(slots.data[0].shape, generator=source)
    for (a, b), alike in zip(itertools.pairwise(work), common, strict=True):
        slots.data[:, :, b.slot, :, :alike] = slots.data[:, :, a.slot, :, :alike]  # make the claim true
    batch = Planner(CPU)(work, common)
    count = len(batch.tokens)
    assert count == sum(len(item.tokens) for item in work)
    q, k, v = (torch.randn(count, heads, 8, generator=source) for heads in (2 * group, 2, 2))
    shared = {span.shared for span in batch.spans}
    assert all(value == 0 or value >= SHARED_MIN for value in shared)
    out = Attention(slots)(0, batch, q, k, v, 0.3)
    at = 0
    for item in work:
        piece = slice(at, at + len(item.tokens))
        expected = reference_attention(slots.layers[0], item, q[piece], 0.3)
        torch.testing.assert_close(out[piece], expected, atol=1e-5, rtol=1e-4)
        at += len(item.tokens)


def test_long_pieces_take_the_fused_kernel_and_agree(monkeypatch):
    monkeypatch.setattr("outrider.engines.embedded.attention.FUSED_FROM", 1)
    slots = make_slots(slots=3)
    slots.data[0] = torch.randn_like(slots.data[0])
    work = [Work(slot=s, start=20 * s, tokens=[0] * (5 + s), wants_logits=False) for s in range(3)]
    batch = Planner(CPU)(work, [0, 0])
    q, k, v = (torch.randn(len(batch.tokens), heads, 8) for heads in (4, 2, 2))
    out = Attention(slots)(0, batch, q, k, v, 0.3)
    at = 0
    for item in work:
        expected = reference_attention(slots.layers[0], item, q[at : at + len(item.tokens)], 0.3)
        torch.testing.assert_close(out[at : at + len(item.tokens)], expected, atol=1e-5, rtol=1e-4)
        at += len(item.tokens)


def lines(*lengths: int) -> list[Work]:
    return [Work(slot=i, start=length - 1, tokens=[0], wants_logits=True) for i, length in enumerate(lengths)]


def test_sequences_of_like_length_share_a_span_and_a_long_one_stands_apart():
    assert plan(lines(*[200] * 8), [0] * 7) == [(0, 8)]
    assert plan(lines(*[200] * 8, 4000), [0] * 8) == [(0, 8), (8, 9)]


def test_groups_with_a_long_common_beginning_are_spans_of_their_own():
    assert plan(lines(*[3000] * 8), [2900, 2900, 2900, 0, 2900, 2900, 2900]) == [(0, 4), (4, 8)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_span_ascends(order):
    work = [Work(slot=slot, start=5, tokens=[0], wants_logits=True) for slot in order]
    assert plan(work, [0]) == ([(0, 2)] if order == (0, 1) else [(0, 1), (1, 2)])
