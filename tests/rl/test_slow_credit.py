"""Estimators that no library at hand has, against the slow obvious reading of their definition."""

from __future__ import annotations

from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rl.advantages import ESTIMATORS, Context, RunningMean, Steps, reinforce_running
from outrider.rl.batch import make_batch
from outrider.types import Sample

REWARDS = st.sampled_from([-1.0, 0.0, 0.125, 0.5, 1.0])  # sums of these are exact, so that equal is equal


@st.composite
def rollouts(draw):
    """For each rollout its group, and its steps as (state, reward)."""
    step = st.tuples(st.sampled_from(["here", "there", ""]), REWARDS)
    rollout = st.tuples(st.sampled_from("gh"), st.lists(step, min_size=1, max_size=4))
    return draw(st.lists(rollout, min_size=1, max_size=6))


def estimate(name, made, **more):
    """One advantage for each step of each rollout, as lists."""
    counts = [len(steps) for _, steps in made]
    context = Context(
        steps=Steps(
            rollout=np.repeat(np.arange(len(made)), counts),
            rewards=np.array([reward for _, steps in made for _, reward in steps]),
            states=[state for _, steps in made for state, _ in steps],
        ),
        **more,
    )
    got = ESTIMATORS[name](np.zeros(len(made)), [group for group, _ in made], context)
    return [part.tolist() for part in np.split(got, np.cumsum(counts)[:-1])]


def to_go(steps, t, gamma):
    return sum(gamma**later * reward for later, (_, reward) in enumerate(steps[t:]))


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)


@given(made=rollouts(), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_return_to_go(made, gamma):
    def baseline(group, t):
        return mean(to_go(steps, min(t, len(steps) - 1), gamma) for g, steps in made if g == group)

    expected = [[to_go(steps, t, gamma) - baseline(group, t) for t in range(len(steps))] for group, steps in made]
    same(estimate("return_to_go", made, gamma=gamma), expected)


@pytest.mark.parametrize("name", ["gigpo", "dr_gigpo"])
@given(made=rollouts(), gamma=st.sampled_from([0.5, 1.0]))
def test_gigpo(name, made, gamma):
    def against(value, others):
        if len(set(others)) < 2:
            return 0.0
        return (value - mean(others)) / (stdev(others) + 1e-6 if name == "gigpo" else 1.0)

    def total(steps):
        return sum(reward for _, reward in steps)

    def advantage(group, steps, t):
        totals = [total(other) for g, other in made if g == group]
        state = steps[t][0]
        peers = [
            to_go(other, u, gamma) for g, other in made for u, (s, _) in enumerate(other) if g == group and s == state
        ]
        return against(total(steps), totals) + 0.5 * (against(to_go(steps, t, gamma), peers) if state else 0.0)

    expected = [[advantage(group, steps, t) for t in range(len(steps))] for group, steps in made]
    same(estimate(name, made, gamma=gamma, step_weight=0.5), expected)


@given(batches=st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=1, max_size=6), decay=st.floats(0.1, 0.99))
def test_the_running_baseline_weighs_a_batch_by_its_age(batches, decay):
    running = RunningMean()
    for batch in batches:
        running = running.after(batch, decay)
    ages = range(len(batches) - 1, -1, -1)
    weighed = sum(decay**age * mean(batch) for age, batch in zip(ages, batches, strict=True))
    expected = weighed / sum(decay**age for age in ages)
    assert running.mean == pytest.approx(expected, rel=1e-9, abs=1e-12)
    got = reinforce_running(np.array([1.0, 0.0]), ["a", "b"], Context(running=running.mean))
    assert got.tolist() == pytest.approx([1 - expected, -expected], abs=1e-12)


@given(data=st.data(), normalisation=st.sampled_from(["rollout", "constant"]))
def test_gpg_scales_by_the_rollouts_that_have_signal(data, normalisation):
    """Its objective is a mean over all B rollouts, times B over those in groups with two different rewards. `token`
    comes to the same, with tokens for rollouts."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = [(f"r{g}{i}", f"g{g}") for g, size in enumerate(sizes) for i in range(size)]
    rewards = {name: data.draw(REWARDS) for name, _ in names}
    lengths = {name: data.draw(st.integers(1, 5)) for name, _ in names}
    samples = [row(name, group, lengths[name]) for name, group in names]
    made = make_batch(samples, rewards, dict(names), estimator="gpg", normalisation=normalisation, constant_tokens=7)
    got = {r.sample.rollout_id: float((r.weights.astype(np.float64) * r.advantages).sum()) for r in made.rows}
    of_group = {group: [rewards[name] for name, g in names if g == group] for _, group in names}
    live = [name for name, group in names if len(set(of_group[group])) > 1]
    assert set(got) == set(live)
    for name, group in names:
        advantage = rewards[name] - mean(of_group[group])
        per_token = lengths[name] if normalisation == "rollout" else 7
        alpha = len(names) / len(live) if live else 0.0
        expected = alpha / len(names) * lengths[name] / per_token * advantage
        assert got.get(name, 0.0) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def row(rollout: str, group: str, trained: int) -> Sample:
    mask = np.arange(trained + 1) > 0
    return Sample(
        rollout_id=rollout,
        group_id=group,
        attempt_id=rollout,
        token_ids=np.arange(trained + 1, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int32),
    )
