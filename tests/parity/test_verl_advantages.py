"""Estimators against verl's `core_algos`, on random ragged batches, to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from outrider.rl.advantages import ESTIMATORS, Context, Steps
from outrider.rl.advantages.reinforce import whiten

PLAIN = AlgoConfig(gamma=1.0)


def theirs(name: str, batch, **more) -> np.ndarray:
    """One number for each rollout: what all its trained tokens get."""
    estimate = core_algos.get_adv_estimator_fn(name)
    got, _ = estimate(token_level_rewards=batch.token_rewards, response_mask=batch.mask, **more)
    first = batch.mask.argmax(1)
    rows = got[torch.arange(len(got)), first]
    assert torch.allclose(got * batch.mask, rows[:, None] * batch.mask)
    return rows.numpy()


def ours(name: str, batch, **context) -> np.ndarray:
    rewards = batch.rewards.numpy().astype(np.float32)
    return ESTIMATORS[name](rewards, batch.groups, Context(lengths=batch.lengths, **context))


def close(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("reference", ["grpo", "grpo_vectorized"])
def test_grpo(batch, reference):
    close(ours("grpo", batch), theirs(reference, batch, index=batch.index))


@pytest.mark.parametrize("reference", ["grpo", "grpo_vectorized"])
def test_dr_grpo(batch, reference):
    close(ours("dr_grpo", batch), theirs(reference, batch, index=batch.index, norm_adv_by_std_in_grpo=False))


@pytest.mark.parametrize("reference", ["rloo", "rloo_vectorized"])
def test_rloo(batch, reference):
    close(ours("rloo", batch), theirs(reference, batch, index=batch.index))


def test_opo(batch):
    close(ours("opo", batch), theirs("opo", batch, index=batch.index))


def test_gpg(batch):
    """verl multiplies by (rollouts / rewards that are not 0), where the paper has (rollouts / those in groups with
    signal). Here that factor lies in the normalisation, which counts the latter."""
    scale = len(batch.rewards) / int(torch.count_nonzero(batch.rewards))
    close(ours("gpg", batch) * scale, theirs("gpg", batch, index=batch.index))


def test_grpo_passk(batch):
    close(ours("grpo_passk", batch), theirs("grpo_passk", batch, index=batch.index, config=AlgoConfig()))


def test_reinforce_pp(batch):
    close(ours("reinforce_pp", batch), theirs("reinforce_plus_plus", batch, config=PLAIN))


def test_reinforce_pp_baseline(batch):
    close(ours("reinforce_pp_baseline", batch), theirs("reinforce_plus_plus_baseline", batch, index=batch.index))


def test_reinforce_is_remax_with_a_baseline_of_nothing(batch):
    none = torch.zeros_like(batch.rewards)
    close(ours("reinforce", batch), theirs("remax", batch, reward_baselines=none))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.5)])
def test_gae_over_tokens(batch, gamma, lam):
    values = torch.from_numpy(np.random.default_rng(0).normal(size=batch.mask.shape)).float().double()
    advantages, returns = core_algos.compute_gae_advantage_return(
        batch.token_rewards, values, batch.mask, torch.tensor(gamma), torch.tensor(lam)
    )
    trained = batch.mask.bool()
    steps = Steps(
        rollout=trained.nonzero()[:, 0].numpy(),
        rewards=batch.token_rewards[trained].float().numpy(),
        values=values[trained].float().numpy(),
    )
    raw = ESTIMATORS["gae"](batch.rewards.float().numpy(), batch.groups, Context(steps=steps, gamma=gamma, lam=lam))
    np.testing.assert_allclose(raw + steps.values, returns[trained].numpy(), rtol=2e-6, atol=2e-6)
    whitened = whiten(raw.astype(np.float64), np.ones(len(raw)))
    np.testing.assert_allclose(whitened, advantages[trained].numpy(), rtol=2e-6, atol=2e-6)


def test_return_to_go_over_tokens(batch):
    """verl has the discounted return inside REINFORCE++, before it whitens."""
    from outrider.rl.advantages.steps import discounted

    rewards = batch.token_rewards + 0.1 * batch.mask
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.mask, config=AlgoConfig(gamma=0.9)
    )
    trained = batch.mask.bool()
    got = discounted(rewards[trained].numpy(), trained.nonzero()[:, 0].numpy(), 0.9)
    np.testing.assert_allclose(got, returns[trained].numpy(), rtol=1e-6, atol=1e-6)
