from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BatchError, ConfigError
from outrider.rl.advantages import Context
from outrider.rl.batch import NO_REWARD, NO_SIGNAL, NOTHING_TRAINABLE, Batch, make_batch
from outrider.rl.credit import Evidence
from outrider.rl.normalisation import CONSTANT_TOKENS
from outrider.types import Sample


def row(rollout: str, group: str, trained: int, context: int = 2) -> Sample:
    total = context + trained
    mask = np.arange(total) >= context
    return Sample(
        rollout_id=rollout,
        group_id=group,
        attempt_id=f"{rollout}.a1",
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int32),
    )


def batch(samples, rewards, **options) -> Batch:
    groups = {sample.rollout_id: sample.group_id for sample in samples}
    return make_batch(samples, rewards, {name: groups.get(name, "g") for name in rewards}, **options)


def weight_of(made: Batch, rollout: str) -> float:
    return float(sum(row.weights.sum() for row in made.rows if row.sample.rollout_id == rollout))


def test_R02_baseline_and_weight_count_rollouts_not_rows():
    samples = [row("r1", "g", 4), row("r1", "g", 2), row("r1", "g", 6), row("r2", "g", 3)]
    made = batch(samples, {"r1": 1.0, "r2": 0.0}, estimator="dr_grpo")
    assert [float(item.advantages[-1]) for item in made.rows] == [0.5, 0.5, 0.5, -0.5]
    assert weight_of(made, "r1") == pytest.approx(0.5)
    assert weight_of(made, "r2") == pytest.approx(0.5)
    assert all((item.weights[~item.sample.loss_mask] == 0).all() for item in made.rows)
    assert (made.groups, made.groups_trained, made.rollouts_trained, made.tokens) == (1, 1, 2, 15)


def test_R03_members_without_trained_tokens_or_reward_leave_the_baseline():
    made = batch([row("r1", "g", 0), row("r2", "g", 3)], {"r1": 100.0, "r2": 1.0})
    assert made.rows == ()
    assert made.advantages == {"r2": 0.0}
    assert made.excluded == Counter({NOTHING_TRAINABLE: 1, NO_SIGNAL: 1})

    samples = [row(name, "g", 2) for name in ("r1", "r2", "r3", "r4")]
    for missing in (None, float("nan"), float("inf")):
        made = batch(samples, {"r1": 1.0, "r2": 3.0, "r3": 2.0, "r4": missing}, estimator="dr_grpo")
        assert made.advantages == {"r1": -1.0, "r2": 1.0, "r3": 0.0}
        assert made.excluded == Counter({NO_REWARD: 1})
        assert [item.sample.rollout_id for item in made.rows] == ["r1", "r2", "r3"]


def test_rollouts_without_sample_and_reward_were_counted_by_the_caller():
    made = batch([row("r1", "g", 1), row("r2", "g", 1)], {"r1": 1.0, "r2": 0.0, "lost": None, "mute": 0.0})
    assert made.excluded == Counter({NOTHING_TRAINABLE: 1})
    assert made.groups == 1


def test_R10_nothing_to_learn_is_an_empty_batch():
    flat = [row(f"r{i}", f"g{i // 2}", 2) for i in range(4)]
    made = batch(flat, {"r0": 0.1, "r1": 0.1, "r2": 1.0, "r3": 1.0})
    assert (made.rows, made.groups, made.groups_trained, made.tokens) == ((), 2, 0, 0)
    assert made.excluded == Counter({NO_SIGNAL: 4})
    assert batch([row("r1", "g", 0)], {"r1": 1.0}).rows == ()
    assert batch([], {}).rows == ()


def test_a_group_without_signal_changes_nothing_for_the_others():
    live = [row("r1", "g", 4), row("r2", "g", 2)]
    dead = [row("r3", "h", 3), row("r4", "h", 3)]
    alone = batch(live, {"r1": 1.0, "r2": 0.0})
    beside = batch(live + dead, {"r1": 1.0, "r2": 0.0, "r3": 1.0, "r4": 1.0})
    for one, other in zip(alone.rows, beside.rows, strict=True):
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_array_equal(one.advantages, other.advantages)


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_running", "reinforce_pp"])
def test_a_reward_of_0_is_no_lack_of_signal_where_groups_are_not_compared(estimator):
    """Plain REINFORCE is a mean over all rollouts. Left out, those of reward 0 would leave longer steps to the others,
    the longer the fewer succeed."""
    samples = [row("r1", "g", 2), row("r2", "g", 2), row("r3", "h", 2), row("r4", "h", 2)]
    rewards = {"r1": 1.0, "r2": 0.0, "r3": 0.0, "r4": 0.0}
    made = batch(samples, rewards, estimator=estimator, context=Context(running=0.0))
    assert len(made.rows) == made.rollouts_trained == 4
    assert not made.excluded
    assert [weight_of(made, name) for name in rewards] == pytest.approx([0.25] * 4)
    assert made.groups_trained == (2 if estimator == "reinforce_pp" else 1)
    nothing = batch(samples, dict.fromkeys(rewards, 0.0), estimator=estimator, context=Context(running=0.0))
    assert nothing.rows == ()  # R10: no update at all
    assert nothing.excluded == Counter({NO_SIGNAL: 4})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rollout", [1 / 2 / 6, 1 / 2 / 6, 1 / 2 / 3]),
        ("token", [1 / 9] * 3),
        ("sequence", [1 / 3 / 4, 1 / 3 / 2, 1 / 3 / 3]),
        ("constant", [1 / 2 / CONSTANT_TOKENS] * 3),
    ],
)
def test_normalisations_by_hand(name, expected):
    samples = [row("r1", "g", 4), row("r1", "g", 2), row("r2", "g", 3)]
    made = batch(samples, {"r1": 1.0, "r2": 0.0}, normalisation=name)
    np.testing.assert_allclose([item.weights[-1] for item in made.rows], expected, rtol=1e-6)


def test_rewards_are_what_they_were_given_as():
    """In float32 0.7 is below 0.7: nobody would have solved what a reward of 0.7 solves."""
    samples = [row("r1", "g", 1), row("r2", "g", 1), row("r3", "g", 1)]
    rewards = {"r1": 0.7, "r2": 0.6, "r3": 0.1}
    made = batch(samples, rewards, estimator="pass_at_k", context=Context(k=1, success=0.7))
    assert made.advantages["r1"] > 0 > made.advantages["r2"]
    assert made.earned == (0.7, 0.6, 0.1)


@given(data=st.data(), normalisation=st.sampled_from(["rollout", "token", "constant"]))
def test_splitting_and_reordering_rows_changes_no_gradient(data, normalisation):
    """The gradient sums ``weight * advantage`` over tokens, so it is enough that each token keeps its product."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=5))
    rewards = {f"r{i}": data.draw(st.sampled_from([0.0, 0.5, 1.0])) for i in range(len(lengths))}
    whole = [row(f"r{i}", "g", length) for i, length in enumerate(lengths)]
    parts: list[Sample] = []
    for sample in whole:  # several rows over the same ids, each training another part: what a tree gives
        at = data.draw(st.integers(0, len(sample.token_ids)))
        first = np.arange(len(sample.token_ids)) < at
        masks = [sample.loss_mask & first, sample.loss_mask & ~first]
        parts += [replace(sample, loss_mask=mask) for mask in masks if mask.any()]
    parts = data.draw(st.permutations(parts))

    def credit(made: Batch) -> dict[str, np.ndarray]:
        total: dict[str, np.ndarray] = {}
        for item in made.rows:
            product = item.weights.astype(np.float64) * item.advantages
            total[item.sample.rollout_id] = total.get(item.sample.rollout_id, 0) + product
        return total

    one = credit(batch(whole, rewards, normalisation=normalisation))
    other = credit(batch(parts, rewards, normalisation=normalisation))
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], rtol=1e-5, atol=1e-9)


def test_reference_logprobs_ride_along():
    samples = [row("r0", "g", 1), row("r1", "g", 1), row("r2", "g", 1)]
    reference = [np.full(3, -value, np.float32) for value in (3.0, 1.0, 2.0)]
    made = batch(samples, {"r0": None, "r1": 1.0, "r2": 0.0}, evidence=Evidence(reference_logprobs=reference))
    assert [item.reference_logprobs[0] for item in made.rows] == [-1.0, -2.0]
    assert batch(samples, {"r0": 0.0, "r1": 1.0, "r2": 0.0}).rows[0].reference_logprobs is None


def test_contradictions_are_refused():
    good = row("r1", "g", 2)
    rewards, groups = {"r1": 1.0}, {"r1": "g"}
    with pytest.raises(BatchError, match="no reward entry"):
        make_batch([row("r9", "g", 2)], rewards, groups)
    with pytest.raises(BatchError, match="no group"):
        make_batch([good], rewards, {})
    with pytest.raises(BatchError, match="a sample says"):
        make_batch([replace(good, group_id="other")], rewards, groups)
    with pytest.raises(BatchError, match="differ in length"):
        make_batch([replace(good, logprobs=good.logprobs[:-1])], rewards, groups)
    with pytest.raises(BatchError, match="first token"):
        make_batch([replace(good, loss_mask=np.ones(4, bool))], rewards, groups)
    with pytest.raises(BatchError, match="not finite"):
        make_batch([replace(good, logprobs=np.full(4, np.nan, np.float32))], rewards, groups)
    with pytest.raises(ConfigError, match=r"train\.advantage.*grpo"):
        make_batch([good], rewards, groups, estimator="nope")
    with pytest.raises(ConfigError, match=r"train\.normalisation.*rollout"):
        make_batch([good], rewards, groups, normalisation="nope")
