"""From samples to the gradient of a real, small model: what must not matter does not, for every loss and estimator.

Rollouts here are as a tree gives them: some are one row, some are a row for each call, which share their beginnings.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fakes.tiny_model import save_model, tiny_config
from outrider.backends.torch import TorchBackend
from outrider.protocols import LossSpec
from outrider.rl.advantages import Context
from outrider.rl.batch import make_batch
from outrider.rl.correction import Bounds, correct
from outrider.rl.credit import Evidence
from outrider.rl.losses import LOSSES
from outrider.rl.steps import context
from outrider.types import Sample

VOCABULARY = 120
SPEC = LossSpec(clip_low=0.3, clip_high=0.5, dual_clip=3.0, divergence=0.1, entropy_coef=0.02, kl_coef=0.1, kl="k2")
REWARDS = {"a0": 1.0, "a1": 0.0, "a2": 0.25, "b0": 0.0, "b1": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"), tiny_config(VOCABULARY))


def rollouts(seed: int = 0) -> list[Sample]:
    """Two groups; each rollout one row of two or three calls."""
    rng = np.random.default_rng(seed)
    made = []
    for name in REWARDS:
        ids, mask, calls = list(range(10)), [False] * 10, [-1] * 10
        for call in range(2 + int(name[1]) % 2):
            asked, answered = rng.integers(0, VOCABULARY, 4), rng.integers(0, VOCABULARY, int(rng.integers(1, 6)))
            ids += [*asked, *answered]
            mask += [False] * len(asked) + [True] * len(answered)
            calls += [-1] * len(asked) + [call] * len(answered)
        trained = np.array(mask)
        made.append(
            Sample(
                rollout_id=name,
                group_id=name[0],
                attempt_id=f"{name}.a1",
                token_ids=np.array(ids, dtype=np.int32),
                loss_mask=trained,
                logprobs=np.where(trained, -rng.uniform(3, 6, len(ids)), 0).astype(np.float32),
                versions=np.where(trained, 0, -1).astype(np.int32),
                call_index=np.array(calls, dtype=np.int32),
                temperature=0.7 if name[0] == "b" else 1.0,
            )
        )
    return made


def split(sample: Sample) -> list[Sample]:
    """A row for each call, with the same tokens before it: what a tree gives where each prompt opens a branch."""
    parts = []
    for call in np.unique(sample.call_index[sample.loss_mask]):
        mine = sample.call_index == call
        end = int(np.flatnonzero(mine)[-1]) + 1
        parts.append(
            replace(
                sample,
                token_ids=sample.token_ids[:end],
                loss_mask=mine[:end],
                logprobs=np.where(mine, sample.logprobs, 0)[:end].astype(np.float32),
                versions=np.where(mine, 0, -1)[:end].astype(np.int32),
                call_index=np.where(mine, call, -1)[:end].astype(np.int32),
            )
        )
    return parts


def gradient(model, samples, *, loss=SPEC, budget=4096, share=True, methods=(), **options) -> dict[str, torch.Tensor]:
    """The whole way: credit, proximal and reference log-probs, correction, forward and backward."""
    backend = TorchBackend(model, precision="float32", threads=1, token_budget=budget, share_prefixes=share)
    made = make_batch(samples, REWARDS, {name: name[0] for name in REWARDS}, **options)
    old = backend.logprobs([row.sample for row in made.rows])
    rows = [
        replace(
            row,
            reference_logprobs=given - np.float32(0.3),
            old_logprobs=np.where(row.sample.loss_mask, given + 0.5 * row.sample.logprobs + 2, 0).astype(np.float32),
        )
        for row, given in zip(made.rows, old, strict=True)
    ]
    if methods:
        rows = list(correct(rows, methods, Bounds(geometric_low=0.1, geometric_high=10)).rows)
    backend.forward_backward(rows, loss)
    parameters = backend._model.module.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in parameters if parameter.grad is not None}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert any(grad.abs().max() > 1e-3 for grad in one.values())  # there is something to compare
    for name, grad in one.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-4, atol=1e-6 * max(1.0, float(grad.abs().max())))


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"gspo"}))  # a row is gspo's sequence: splitting one changes it
def test_rows_micro_batches_packing_and_order_change_nothing(model, name):
    loss = replace(SPEC, name=name)
    whole = rollouts()
    parts = list(itertools.chain.from_iterable(split(sample) for sample in whole))
    plain = gradient(model, whole, loss=loss, share=False)
    assert_same(plain, gradient(model, parts, loss=loss))  # split, and packed with their prefixes shared
    assert_same(plain, gradient(model, parts[::-1], loss=loss, share=False, budget=40))  # about a row a micro-batch
    assert_same(plain, gradient(model, [whole[0], *parts[2:]], loss=loss, budget=70))


def test_a_row_is_gspos_sequence_whatever_micro_batch_it_is_in(model):
    loss, rows = replace(SPEC, name="gspo"), rollouts()
    plain = gradient(model, rows, loss=loss, share=False)
    assert_same(plain, gradient(model, rows[::-1], loss=loss, budget=40))


@pytest.mark.parametrize(
    "estimator", ["grpo", "rloo", "opo", "reinforce_pp_baseline", "return_to_go", "gigpo", "pass_at_k"]
)
def test_estimators_count_rollouts(model, estimator):
    calls = {"a0": np.array([0.5, 0.1], np.float32), "b1": np.array([0, 0.3, 0.2], np.float32)}
    options = {
        "estimator": estimator,
        "context": Context(gamma=0.9, k=2),
        "evidence": Evidence(call_rewards=calls, state=context),
    }
    whole = rollouts()
    parts = list(itertools.chain.from_iterable(split(sample) for sample in whole))[::-1]
    assert_same(gradient(model, whole, **options), gradient(model, parts, **options))


@pytest.mark.parametrize("normalisation", ["rollout", "token", "constant"])
def test_normalisations_count_no_rows(model, normalisation):
    whole = rollouts()
    parts = list(itertools.chain.from_iterable(split(sample) for sample in whole))
    one = gradient(model, whole, normalisation=normalisation, constant_tokens=9)
    assert_same(one, gradient(model, parts, normalisation=normalisation, constant_tokens=9, budget=50))


@pytest.mark.parametrize("methods", [("sequence_tis",), ("icepop",), ("geometric", "token_tis")])
def test_corrections_count_no_rows(model, methods):
    whole = rollouts()
    parts = list(itertools.chain.from_iterable(split(sample) for sample in whole))[::-1]
    assert_same(gradient(model, whole, methods=methods), gradient(model, parts, methods=methods))


def test_devices_that_share_a_batch_add_up_to_one(model):
    """Weights hold the normalisation of the whole batch, so each device takes any rows and gradients are summed."""
    backend = TorchBackend(model, precision="float32", threads=1)
    made = make_batch(rollouts(), REWARDS, {name: name[0] for name in REWARDS})
    totals: list[dict[str, torch.Tensor]] = []
    for shares in ([made.rows], [made.rows[:1], made.rows[1:4], made.rows[4:]]):
        total: dict[str, torch.Tensor] = {}
        for rows in shares:
            backend.forward_backward(rows, replace(SPEC, kl_coef=0.0))
            for name, parameter in backend._model.module.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
                    parameter.grad = None
        totals.append(total)
    assert_same(*totals)


def test_dividing_by_rows_would_weigh_a_rollout_by_its_rows(model):
    """The fault itself: `sequence` is GRPO as published, and means something else once a rollout is several rows."""
    whole = rollouts()
    parts = list(itertools.chain.from_iterable(split(sample) for sample in whole))
    one = gradient(model, whole, normalisation="sequence")
    other = gradient(model, parts, normalisation="sequence")
    assert any((other[name] - grad).abs().max() > 1e-3 for name, grad in one.items())
