"""Credit and correction against TRL's trainers: what their `_generate_and_score_completions` makes of rewards.

The trainers are not built: their method gets an object that has generated and scored already, and log-probs as given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from outrider.rl.correction import Bounds, correct
from outrider.rl.credit import Evidence
from outrider.rl.kl_reward import kl_penalties

SIZE = 4
THEIR_EPSILON, OUR_EPSILON = 1e-4, 1e-6  # added to the standard deviation


class Trainer(SimpleNamespace):
    """An attribute that the method asks for, and that is not given here, is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def theirs(kind, batch, **more) -> dict[str, Any]:
    """What the method of the trainer class `kind` gives for the completions of `batch`, groups of `SIZE` each."""
    lengths = [int(mask.nonzero().max()) + 1 for mask in batch.mask]
    completions = [[5] * length for length in lengths]
    longest = max(lengths)
    trained = [mask[:length].long().tolist() for mask, length in zip(batch.mask, lengths, strict=True)]
    sampled = [row[:length].tolist() for row, length in zip(batch.behaviour, lengths, strict=True)]
    prompts, texts = [[1]] * len(lengths), [""] * len(lengths)
    generated: tuple[Any, ...] = (prompts, completions, trained, texts, sampled, {}, None, None)
    if kind is RLOOTrainer:
        generated = (prompts, completions, texts)
    trainer = Trainer(
        accelerator=SimpleNamespace(
            device="cpu", process_index=0, num_processes=1, gather=lambda t: t, reduce=lambda t, **_: t
        ),
        args=SimpleNamespace(
            per_device_train_batch_size=len(lengths),
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            gradient_checkpointing_kwargs=None,
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model="reference",
        num_iterations=1,
        num_generations=SIZE,
        beta=0.0,
        scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_funcs=[None],
        reward_func_names=["reward"],
        eos_token_ids=[5],
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda *a, **k: generated,
        _calculate_rewards=lambda *a, **k: batch.rewards[:, None].clone(),
        _get_per_token_logps_and_entropies=lambda model, *a, **k: (
            (batch.reference if model == "reference" else batch.old)[:, :longest],
            None,
            None,
        ),
    )
    for name, value in more.items():
        setattr(trainer, name, value)
    return kind._generate_and_score_completions(trainer, [{"prompt": "?"}] * len(lengths))


def in_fours(batch):
    """As many rollouts of `batch` as fill groups of `SIZE`, side by side."""
    count = len(batch.groups) // SIZE * SIZE
    names = ("rewards", "mask", "behaviour", "old", "logp", "reference", "advantages")
    groups = [f"g{number // SIZE}" for number in range(count)]
    return replace(batch, groups=groups, **{name: getattr(batch, name)[:count] for name in names})


@pytest.fixture(params=[0, 1, 2])
def even(request, batch):
    """With `request.param` of the first group's rollouts unscored; TRL trains all tokens of a completion."""
    batch = in_fours(batch)
    places = torch.arange(batch.mask.shape[1])
    last = (batch.mask * places).amax(1, keepdim=True)
    batch.rewards[: request.param] = torch.nan
    return replace(batch, mask=(places <= last).double())


def ours(batch, estimator: str, **more) -> np.ndarray:
    """0 for those that were left out, as TRL has it."""
    advantages = batch.made(estimator, **more).advantages
    return np.array([advantages.get(f"r{i}", 0.0) for i in range(len(batch.groups))])


def close(one: np.ndarray, other: torch.Tensor) -> None:
    np.testing.assert_allclose(one, other.numpy(), rtol=1e-6, atol=1e-9)


def test_grpo_up_to_what_is_added_to_the_deviation(even):
    reference = theirs(GRPOTrainer, even)["advantages"]
    deviation = torch.tensor([r[~r.isnan()].std() for r in even.rewards.view(-1, SIZE)]).repeat_interleave(SIZE)
    close(ours(even, "grpo"), reference * (deviation + THEIR_EPSILON) / (deviation + OUR_EPSILON))


def test_dr_grpo_and_unscored_siblings(even):
    close(ours(even, "dr_grpo"), theirs(GRPOTrainer, even, scale_rewards="none")["advantages"])


def test_rloo_and_unscored_siblings(even):
    close(ours(even, "rloo"), theirs(RLOOTrainer, even)["advantages"])


def test_a_kl_in_the_reward_comes_off_a_rollouts_sum(even):
    reference = theirs(RLOOTrainer, even, beta=0.05)["advantages"]
    old, anchor = even.padded(even.old), even.padded(even.reference)
    evidence = Evidence(penalties=kl_penalties(even.samples(), old, anchor, 0.05, "k1"))
    np.testing.assert_allclose(ours(even, "rloo", evidence=evidence), reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "mode", "bounds", "low", "high"),
    [
        ("token_tis", "token_truncate", Bounds(tis_cap=2.0), None, 2.0),
        ("sequence_tis", "sequence_truncate", Bounds(tis_cap=2.0), None, 2.0),
        ("icepop", "token_mask", Bounds(icepop_low=0.5, icepop_high=3.0), 0.5, 3.0),
    ],
)
def test_corrections(far_off, method, mode, bounds, low, high):
    """Context between turns is TRL's tool mask."""
    batch = in_fours(far_off)
    ratio = theirs(
        GRPOTrainer,
        batch,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]
    rows = batch.rows()
    for row, expected in zip(correct(rows, [method], bounds).rows, ratio, strict=True):
        at = np.flatnonzero(row.sample.loss_mask)
        of_token = expected.expand(len(row.advantages))[at] if len(expected) == 1 else expected[at - 1]
        np.testing.assert_allclose(row.advantages[at], of_token, rtol=1e-6)
    assert ratio.unique().numel() > 2
