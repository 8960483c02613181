"""Does it learn? A policy small enough to enumerate: every estimator and every loss makes the right answer likelier.

A rollout is two calls. The first answer is one of three tokens and decides the reward; the second says nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.protocols import LossSpec
from outrider.rl.advantages import ESTIMATORS, Context
from outrider.rl.batch import Batch, make_batch
from outrider.rl.correction import Bounds, correct
from outrider.rl.credit import Evidence
from outrider.rl.kl_reward import kl_penalties
from outrider.rl.losses import LOSSES, Tokens
from outrider.types import Row, Sample

ANSWERS, RIGHT = (3, 4, 5), 4
VOCABULARY = 8
GROUPS, SIZE = 4, 8


def policy() -> torch.Tensor:
    """Logits by the token before, all equal."""
    return torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)


def log_probs(table: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Only the three answers can be said."""
    allowed = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
    allowed[list(ANSWERS)] = 0
    return torch.log_softmax(table[before] + allowed, dim=-1)


def roll_out(table: torch.Tensor, name: str, group: str, rng: np.random.Generator) -> Sample:
    ids, mask = [1], [False]
    for asked in (2, 6):
        ids.append(asked)
        chances = log_probs(table, torch.tensor(asked)).exp().detach().numpy()
        ids.append(int(rng.choice(VOCABULARY, p=chances)))
        mask += [False, True]
    trained, token_ids = np.array(mask), np.array(ids, dtype=np.int32)
    sample = Sample(
        rollout_id=name,
        group_id=group,
        attempt_id=name,
        token_ids=token_ids,
        loss_mask=trained,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
        call_index=np.where(trained, np.arange(len(ids)) // 3, -1).astype(np.int32),
    )
    return replace(sample, logprobs=scored(table, sample))


def scored(table: torch.Tensor, sample: Sample) -> np.ndarray:
    found = np.zeros(len(sample.token_ids), dtype=np.float32)
    found[sample.loss_mask] = trained_log_probs(table, sample).detach().numpy()
    return found


def trained_log_probs(table: torch.Tensor, sample: Sample) -> torch.Tensor:
    at = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    ids = torch.from_numpy(sample.token_ids).long()
    return log_probs(table, ids[at - 1])[torch.arange(len(at)), ids[at]]


def loss_of(table: torch.Tensor, rows: list[Row], spec: LossSpec) -> torch.Tensor:
    def joined(arrays: list[np.ndarray]) -> torch.Tensor:
        parts = [array[row.sample.loss_mask] for array, row in zip(arrays, rows, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).double()

    tokens = Tokens(
        logp=torch.cat([trained_log_probs(table, row.sample) for row in rows]),
        behaviour_logp=joined([row.sample.logprobs for row in rows]),
        advantages=joined([row.advantages for row in rows]),
        row=torch.repeat_interleave(torch.arange(len(rows)), 2),
    )
    return (joined([row.weights for row in rows]) * LOSSES[spec.name](tokens, spec).loss).sum()


def step_batch(table: torch.Tensor, estimator: str, rng: np.random.Generator) -> Batch:
    samples = [roll_out(table, f"{g}-{n}", f"g{g}", rng) for g in range(GROUPS) for n in range(SIZE)]
    rewards = {s.rollout_id: float(s.token_ids[2] == RIGHT) for s in samples}
    values = [np.where(s.loss_mask, np.mean(list(rewards.values())), 0).astype(np.float32) for s in samples]
    return make_batch(
        samples,
        rewards,
        {s.rollout_id: s.group_id for s in samples},
        estimator=estimator,
        context=Context(k=2, running=0.3, gamma=0.99, lam=0.95),
        evidence=Evidence(values=values),
    )


def right(table: torch.Tensor) -> float:
    return float(log_probs(table, torch.tensor(2)).detach().exp()[RIGHT])


def learn(estimator: str, spec: LossSpec, steps: int = 25) -> float:
    table, rng = policy(), np.random.default_rng(0)
    for _ in range(steps):
        rows = list(step_batch(table, estimator, rng).rows)
        for _ in range(2 if rows else 0):  # the second pass is off policy
            loss_of(table, rows, spec).backward()
            with torch.no_grad():
                table -= 1.0 * table.grad
            table.grad = None
    return right(table)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_every_estimator_learns(estimator):
    assert learn(estimator, LossSpec(name="ppo_clip")) > 0.6


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_learns(name):
    assert learn("rloo", LossSpec(name=name, divergence=0.3)) > 0.6


def expected(table: torch.Tensor, behaviour: torch.Tensor, methods: list[str]) -> torch.Tensor:
    """The exact expectation, over what `behaviour` samples, of the corrected REINFORCE gradient for the first call."""
    total = torch.zeros_like(table)
    chances = log_probs(behaviour, torch.tensor(2)).exp()
    for answer in ANSWERS:
        mask = np.array([False, False, True])
        sample = Sample(
            rollout_id=f"r{answer}",
            group_id="g",
            attempt_id="a",
            token_ids=np.array([1, 2, answer], dtype=np.int32),
            loss_mask=mask,
            logprobs=np.zeros(3, dtype=np.float32),
            versions=np.zeros(3, dtype=np.int32),
            call_index=np.zeros(3, dtype=np.int32),
        )
        sample = replace(sample, logprobs=scored(behaviour, sample))
        advantage = np.where(mask, float(answer == RIGHT) - 0.2, 0).astype(np.float32)
        row = Row(sample=sample, advantages=advantage, weights=advantage, old_logprobs=scored(table, sample))
        (row,) = correct([row], methods, Bounds(tis_cap=1e6, icepop_low=0, icepop_high=1e6)).rows
        loss = -float(row.advantages[2]) * trained_log_probs(table, sample)[0]
        (gradient,) = torch.autograd.grad(loss, table)
        total += chances[answer].detach() * gradient
    return total


@pytest.mark.parametrize("methods", [["token_tis"], ["sequence_tis"], ["icepop"]])
def test_an_uncut_ratio_makes_the_gradient_of_the_policy_itself(methods):
    table, behaviour = policy(), policy()
    with torch.no_grad():
        behaviour[2, 3], behaviour[2, 4] = 0.7, -0.9
    on_policy = expected(table, table, [])
    torch.testing.assert_close(expected(table, behaviour, methods), on_policy, rtol=1e-5, atol=1e-7)
    assert (expected(table, behaviour, []) - on_policy).abs().max() > 0.05  # what is being corrected


def test_k1_in_the_reward_has_the_gradient_of_the_divergence():
    """By expectation over the policy: sum p (-k1) grad log p is minus the gradient of KL(policy || reference)."""
    table, reference = policy(), policy()
    with torch.no_grad():
        table[2, 3], reference[2, 5] = 0.5, 0.8
    logp, goal = log_probs(table, torch.tensor(2))[list(ANSWERS)], log_probs(reference, torch.tensor(2))[list(ANSWERS)]
    (exact,) = torch.autograd.grad((logp.exp() * (logp - goal.detach())).sum(), table, retain_graph=True)
    sample = replace(roll_out(table, "r", "g", np.random.default_rng(0)), loss_mask=np.ones(3, bool))
    (penalty,) = kl_penalties([sample], [logp.detach().float().numpy()], [goal.detach().float().numpy()], 1.0, "k1")
    surrogate = (logp.exp().detach() * torch.from_numpy(penalty).double() * logp).sum()  # the loss -(-penalty) log p
    (got,) = torch.autograd.grad(surrogate, table)
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-7)
