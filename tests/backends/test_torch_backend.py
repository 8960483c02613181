"""The torch backend on a tiny random Llama, against plain transformers."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_by_row import SPEC, backend, by_transformers, gradients, with_reference

from outrider.errors import BatchError, ConfigError
from outrider.protocols import Backend, LossSpec


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [4096, 70])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_loss_gradient_and_logprobs_equal_transformers_row_by_row(tiny, share, budget, checkpointing, branching_rows):
    rows = with_reference(branching_rows(temperatures=(1.0, 0.7)))
    made = backend(tiny, share_prefixes=share, token_budget=budget, gradient_checkpointing=checkpointing)
    stats = made.forward_backward(rows, SPEC)
    loss, expected, logprobs = by_transformers(tiny, rows, SPEC)
    assert stats.loss == pytest.approx(loss, abs=1e-5)
    found = gradients(made)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, float(gradient.abs().max())))
    samples = [row.sample for row in rows]
    for one, other in zip(made.logprobs(samples), logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert stats.tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    lengths = sum(int(np.flatnonzero(sample.loss_mask)[-1]) for sample in samples)
    assert stats.tokens_computed < 0.8 * lengths if share else stats.tokens_computed == lengths


@pytest.mark.parametrize("share", [True, False])
def test_lora_with_checkpointing_has_the_gradient_of_lora_without(tiny, share, branching_rows):
    def after_a_step(checkpointing: bool) -> dict[str, torch.Tensor]:
        made = backend(tiny, lora_rank=4, gradient_checkpointing=checkpointing, share_prefixes=share)
        made.forward_backward(branching_rows(), LossSpec())
        made.optim_step(1e-2)  # now neither factor is 0
        made.forward_backward(branching_rows(1), LossSpec())
        return gradients(made)

    one, other = after_a_step(True), after_a_step(False)
    assert one.keys() == other.keys()
    assert all(".lora_" in name for name in one)
    assert all(float(gradient.abs().max()) > 0 for gradient in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-6)


def test_stats_by_hand(tiny, branching_rows):
    rows = branching_rows()
    made = backend(tiny)
    stats = made.forward_backward(rows, LossSpec())
    mask = np.concatenate([row.sample.loss_mask for row in rows])
    logp = np.concatenate(made.logprobs([row.sample for row in rows]))[mask]
    behaviour = np.concatenate([row.sample.logprobs for row in rows])[mask]
    difference = logp.astype(np.float64) - behaviour
    assert stats.ratio_mean == pytest.approx(np.exp(difference).mean(), rel=1e-4)
    assert stats.kl_behaviour == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-4)
    assert stats.logprob_diff_mean == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert stats.logprob_diff_max == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert 0 < stats.entropy < math.log(300)
    assert stats.kl_reference == 0.0


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), order=st.permutations(range(9)), budget=st.integers(40, 400), share=st.booleans())
def test_order_of_rows_micro_batches_and_sharing_change_no_gradient(tiny, seed, order, budget, share, branching_rows):
    rows = branching_rows(seed)
    one = backend(tiny)
    one.forward_backward(rows, LossSpec())
    other = backend(tiny, share_prefixes=share, token_budget=budget)
    other.forward_backward([rows[index] for index in order[:4]], LossSpec())
    other.forward_backward([rows[index] for index in order[4:]], LossSpec())
    for gradient, expected in zip(gradients(other).values(), gradients(one).values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_splitting_a_rollout_into_rows_changes_no_gradient(tiny, branching_rows, make_row):
    row = branching_rows()[0]
    mask = row.sample.loss_mask
    first = np.arange(len(mask)) < 33
    parts = [
        make_row(row.sample.token_ids, np.flatnonzero(part), advantage=row.advantages[mask][0], weight=0.1)
        for part in (mask & first, mask & ~first)
    ]
    whole = make_row(row.sample.token_ids, np.flatnonzero(mask), advantage=row.advantages[mask][0], weight=0.1)
    one, other = backend(tiny), backend(tiny)
    one.forward_backward([whole], LossSpec())
    other.forward_backward(parts, LossSpec())
    for gradient, expected in zip(gradients(other).values(), gradients(one).values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_reference_is_the_starting_model(tiny, lora_rank, branching_rows):
    samples = [row.sample for row in branching_rows(temperatures=(1.0, 0.7))]  # the reference at a row's own, too
    made = backend(tiny, lora_rank=lora_rank)
    start = made.logprobs(samples)
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-2)
    now = made.logprobs(samples)
    assert made._reference is None  # who asks for no reference pays for none
    reference = made.logprobs(samples, reference=True)
    assert (made._reference is None) == (lora_rank > 0)  # with adapters it is the same weights without them
    np.testing.assert_allclose(np.concatenate(reference), np.concatenate(start), atol=1e-5)
    assert np.abs(np.concatenate(now) - np.concatenate(start)).max() > 0.01
    np.testing.assert_array_equal(np.concatenate(made.logprobs(samples)), np.concatenate(now))


def test_bad_rows_are_refused(tiny, make_row):
    made = backend(tiny)
    row = make_row([1, 2, 3], [1, 2])
    for bad, message in (
        (replace(row, weights=row.weights[:-1]), "weights has length 2"),
        (replace(row, advantages=np.full(3, np.nan, np.float32)), "advantages holds"),
        (make_row([1, 2, 3], [0, 1]), "first token"),
        (make_row([1, 2, 3], [1], temperature=0.0), "temperature"),
    ):
        with pytest.raises(BatchError, match=message):
            made.forward_backward([bad], LossSpec())
    with pytest.raises(BatchError, match="kl_coef"):
        made.forward_backward([row], LossSpec(kl_coef=0.1))
    referenced = replace(row, reference_logprobs=np.zeros(3, np.float32))
    with pytest.raises(BatchError, match="some rows"):
        made.forward_backward([row, referenced], LossSpec())
    with pytest.raises(ConfigError, match=r"train\.loss.*ppo_clip"):
        made.forward_backward([row], LossSpec(name="nope"))
    with pytest.raises(BatchError, match="vocabulary"):
        made.forward_backward([make_row([1, 2, 300], [1])], LossSpec())


def test_a_precision_that_does_not_exist_is_a_clear_error(tiny):
    with pytest.raises(ConfigError, match=r"train\.precision.*float16.*Known: float32, bfloat16, bfloat16-stochastic"):
        backend(tiny, precision="float16")


def test_no_model_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path.*config\.json"):
        backend(tmp_path)


def test_it_is_a_backend(tiny):
    made: Backend = backend(tiny)
    assert made.logprobs([]) == []


def test_a_backend_that_nobody_needs_gives_its_memory_back(tiny, branching_rows):
    made = backend(tiny)
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-3)
    optimiser, model = weakref.ref(made._optimiser), weakref.ref(made._model.module)
    del made
    gc.collect()
    assert (optimiser(), model()) == (None, None)
