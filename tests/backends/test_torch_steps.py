"""Optimiser steps of the torch backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from row_by_row import backend

from outrider.protocols import LossSpec


def test_bfloat16_stays_near_float32_and_masters_take_small_steps(tiny, branching_rows):
    rows = branching_rows()
    exact, narrow = backend(tiny), backend(tiny, precision="bfloat16")
    expected = np.concatenate(exact.logprobs([row.sample for row in rows]))
    assert np.abs(np.concatenate(narrow.logprobs([row.sample for row in rows])) - expected).mean() < 0.05
    weight = narrow._model.module.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    # A step of 2e-5 is below what bfloat16 resolves of most of these weights; only a wider master adds them up.
    narrow.forward_backward(rows, LossSpec())
    narrow.optim_step(2e-5)
    assert (weight != before).float().mean() < 0.1
    for _ in range(60):
        narrow.forward_backward(rows, LossSpec())
        assert not narrow.optim_step(2e-5).skipped
    assert (weight != before).float().mean() > 0.4


@pytest.mark.parametrize(
    ("lora_rank", "precision"), [(0, "bfloat16"), (4, "bfloat16"), (0, "bfloat16-stochastic"), (0, "float32")]
)
def test_preferred_tokens_become_likelier(tiny, lora_rank, precision, make_row):
    good = make_row([1, 2, 3, 4, 5, 6], [3, 4, 5], advantage=1.0)
    bad = make_row([1, 2, 3, 7, 8, 9], [3, 4, 5], advantage=-1.0)
    made = backend(tiny, lora_rank=lora_rank, precision=precision)
    before = made.logprobs([good.sample, bad.sample])
    for _ in range(5):
        made.forward_backward([good, bad], LossSpec(name="reinforce"))
        made.optim_step(1e-3)
    after = made.logprobs([good.sample, bad.sample])
    assert after[0].sum() > before[0].sum() + 1
    assert after[1].sum() < before[1].sum() - 1


def test_R10_without_a_gradient_nothing_moves(tiny, branching_rows, make_row):
    made = backend(tiny, weight_decay=0.5)
    rows = branching_rows()
    made.forward_backward(rows, LossSpec())
    assert not made.optim_step(1e-3).skipped
    before = [p.clone() for p in made._model.module.parameters()]
    stats = made.forward_backward([], LossSpec())
    assert (stats.loss, stats.tokens, stats.tokens_computed) == (0.0, 0, 0)
    masked = make_row([1, 2, 3], [])
    assert made.forward_backward([masked], LossSpec()).tokens == 0
    assert made.optim_step(1e-3).skipped  # momentum and decay would have moved them
    assert all(torch.equal(one, other) for one, other in zip(before, made._model.module.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_skipped(tiny, branching_rows, make_row):
    made = backend(tiny)
    row = make_row([1, 2, 3, 4], [2, 3], behaviour=-20.0, advantage=-3e38)  # its loss overflows
    made.forward_backward([row], LossSpec())
    before = [p.clone() for p in made._model.module.parameters()]
    stats = made.optim_step(1e-3)
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert all(torch.equal(one, other) for one, other in zip(before, made._model.module.parameters(), strict=True))
    made.forward_backward(branching_rows(), LossSpec())
    assert not made.optim_step(1e-3).skipped  # and nothing of it is left


def test_clipping_bounds_the_step(tiny, branching_rows):
    made = backend(tiny, max_grad_norm=1e-4, eps=1.0)  # with a large eps AdamW's step grows with the gradient
    made.forward_backward(branching_rows(), LossSpec())
    before = torch.cat([p.detach().flatten() for p in made._model.module.parameters()])
    stats = made.optim_step(1.0)
    after = torch.cat([p.detach().flatten() for p in made._model.module.parameters()])
    assert stats.grad_norm > 1
    assert float((after - before).norm()) < 2e-4
