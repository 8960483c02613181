"""Estimators against verl's `core_algos`, on random ragged batches, to a relative 1e-6."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos

from outrider.rl.advantages import ESTIMATORS, Context, Steps
from outrider.rl.advantages.reinforce import whiten
from outrider.rl.advantages.steps import discounted
from outrider.rl.credit import Evidence
from outrider.rl.kl_reward import kl_penalties

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


def close(one: np.ndarray, other: np.ndarray, *, atol: float = 1e-9) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=atol)


def atol(reference: str, batch) -> float:
    """verl's vectorised GRPO takes mean and deviation in float32, whatever it is given: that is a rounding of the
    largest reward, over the smallest deviation."""
    if reference != "grpo_vectorized":
        return 1e-9
    groups = [batch.rewards[[g == name for g in batch.groups]] for name in set(batch.groups)]
    return 2**-23 * float(batch.rewards.abs().max()) / min(1.0, *(float(r.std()) for r in groups))


@pytest.mark.parametrize("reference", ["grpo", "grpo_vectorized"])
def test_grpo(batch, reference):
    close(ours("grpo", batch), theirs(reference, batch, index=batch.index), atol=atol(reference, batch))


@pytest.mark.parametrize("reference", ["grpo", "grpo_vectorized"])
def test_dr_grpo(batch, reference):
    reckoned = theirs(reference, batch, index=batch.index, norm_adv_by_std_in_grpo=False)
    close(ours("dr_grpo", batch), reckoned, atol=atol(reference, batch))


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


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "grpo_passk"])
def test_rewards_that_are_0_or_1(solved_or_not, name):
    """Many are equal then, the best ones too."""
    more = {"config": AlgoConfig()} if name == "grpo_passk" else {}
    close(ours(name, solved_or_not), theirs(name, solved_or_not, index=solved_or_not.index, **more))


def test_grpo_passk(batch):
    close(ours("grpo_passk", batch), theirs("grpo_passk", batch, index=batch.index, config=AlgoConfig()))


def test_reinforce_pp(batch):
    close(ours("reinforce_pp", batch), theirs("reinforce_plus_plus", batch, config=PLAIN))


def test_reinforce_pp_baseline(batch):
    close(ours("reinforce_pp_baseline", batch), theirs("reinforce_plus_plus_baseline", batch, index=batch.index))


def test_reinforce_is_remax_with_a_baseline_of_nothing(batch):
    none = torch.zeros_like(batch.rewards)
    close(ours("reinforce", batch), theirs("remax", batch, reward_baselines=none))


def test_a_running_baseline_is_remax_with_that_baseline(batch):
    """ReMax's is the reward of a greedy rollout, one for each; the number of a run is the same for all."""
    same = torch.full_like(batch.rewards, 0.375)
    close(ours("reinforce_running", batch, running=0.375), theirs("remax", batch, reward_baselines=same))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.5)])
def test_gae_over_tokens(batch, gamma, lam):
    """As a run has it, whitened; there the numbers are rounded to float32, and here the returns are about 1."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=batch.mask.shape)).float().double()
    discount, trace = (torch.tensor(number, dtype=torch.float64) for number in (gamma, lam))
    advantages, returns = core_algos.compute_gae_advantage_return(
        batch.token_rewards, values, batch.mask, discount, trace
    )
    trained = batch.mask.bool()
    steps = Steps(
        rollout=trained.nonzero()[:, 0].numpy(),
        rewards=batch.token_rewards[trained].numpy(),
        values=values[trained].numpy(),
    )
    raw = ESTIMATORS["gae"](batch.rewards.numpy(), batch.groups, Context(steps=steps, gamma=gamma, lam=lam))
    close(raw + steps.values, returns[trained].numpy())
    close(whiten(raw, np.ones(len(raw))), advantages[trained].numpy())
    evidence = Evidence(values=batch.padded(values * batch.mask))
    made = batch.made("gae", context=Context(gamma=gamma, lam=lam), evidence=evidence)
    at = np.stack([row.sample.loss_mask for row in made.rows])
    np.testing.assert_allclose(np.stack([row.returns for row in made.rows])[at], returns[trained], rtol=1e-6)
    np.testing.assert_allclose(np.stack([row.advantages for row in made.rows])[at], advantages[trained], rtol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_return_to_go_over_tokens(batch, gamma):
    """verl has the discounted return inside REINFORCE++, before it whitens; where nobody is like another, our baseline
    is left out by giving each rollout a group of its own beside one that earns nothing."""
    rewards = batch.token_rewards + 0.125 * batch.mask
    _, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, batch.mask, config=AlgoConfig(gamma=gamma)
    )
    trained = batch.mask.bool()
    rollout, earned = trained.nonzero()[:, 0].numpy(), rewards[trained].numpy()
    close(discounted(earned, rollout, gamma), returns[trained].numpy())
    count = len(batch.groups)
    steps = Steps(rollout=np.append(rollout, np.arange(count, 2 * count)), rewards=np.append(earned, np.zeros(count)))
    pairs = [str(i) for i in range(count)] * 2
    got = ESTIMATORS["return_to_go"](np.zeros(2 * count), pairs, Context(steps=steps, gamma=gamma))
    close(2 * got[: len(earned)], returns[trained].numpy())


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward(batch, kl):
    """Their token rewards are the task's less 0.1 of the KL, as the trainer of verl has it."""
    penalty = 0.1 * core_algos.kl_penalty(batch.old, batch.reference, kl) * batch.mask
    rewarded = replace(batch, rewards=batch.rewards - penalty.sum(1))
    reference = theirs("reinforce_plus_plus", rewarded, config=PLAIN)
    old, anchor = batch.padded(batch.old), batch.padded(batch.reference)
    evidence = Evidence(penalties=kl_penalties(batch.samples(), old, anchor, 0.1, kl))
    made = batch.made("reinforce_pp", evidence=evidence)
    close(np.array([made.advantages[row.sample.rollout_id] for row in made.rows]), reference, atol=1e-7)
