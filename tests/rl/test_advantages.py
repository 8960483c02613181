from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import GROUP_BASELINES
from outrider.errors import BatchError
from outrider.rl.advantages import (
    ESTIMATORS,
    UNITS,
    Context,
    RunningMean,
    dr_grpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    reinforce_running,
    rloo,
)

OF_ROLLOUTS = sorted(set(ESTIMATORS) - set(UNITS))
BASELINES = sorted(set(GROUP_BASELINES) - set(UNITS))
CENTRED = ("grpo", "dr_grpo", "rloo", "gpg")
rewards_of = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=12)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_hand_worked_numbers():
    rewards, groups = f32(1, 0, 0, 1, 4), ["a", "a", "a", "b", "b"]
    np.testing.assert_allclose(dr_grpo(rewards, groups), [2 / 3, -1 / 3, -1 / 3, -1.5, 1.5], rtol=1e-6)
    np.testing.assert_allclose(rloo(rewards, groups), [1, -0.5, -0.5, -3, 3], rtol=1e-6)
    std_a, std_b = np.sqrt(1 / 3), np.sqrt(4.5)  # with n - 1
    expected = [2 / 3 / std_a, -1 / 3 / std_a, -1 / 3 / std_a, -1.5 / std_b, 1.5 / std_b]
    np.testing.assert_allclose(grpo(rewards, groups), expected, rtol=1e-5)
    np.testing.assert_array_equal(gpg(rewards, groups), dr_grpo(rewards, groups))
    np.testing.assert_array_equal(reinforce(rewards, groups), rewards)
    best = (4 - 1) / std_b
    np.testing.assert_allclose(grpo_passk(rewards, groups), [1 / std_a, 0, 0, 0, best], rtol=1e-5)


def test_opo_weighs_the_baseline_by_length():
    context = Context(lengths=f32(30, 10, 5, 5))
    got = opo(f32(1, 0, 2, 0), ["a", "a", "b", "b"], context)
    np.testing.assert_allclose(got, [0.25, -0.75, 1, -1], rtol=1e-6)
    np.testing.assert_array_equal(opo(f32(1, 0), ["a", "a"]), f32(0.5, -0.5))  # without lengths each counts once


def test_reinforce_pp_whitens_the_batch_by_tokens():
    # tokens: three of reward 1, one of reward 0; mean 3/4, unbiased variance (3 (1/4)**2 + (3/4)**2) / 3 = 1/4
    got = reinforce_pp(f32(1, 0), ["a", "b"], Context(lengths=f32(3, 1)))
    np.testing.assert_allclose(got, [0.5, -1.5], rtol=1e-6)
    assert reinforce_pp(f32(0.1, 0.1, 0.1), ["a", "b", "c"]).tolist() == [0, 0, 0]


def test_reinforce_pp_baseline_centres_groups_then_whitens():
    # after the group means: 1, -1, 2, -2; mean 0, unbiased variance 10/3
    got = reinforce_pp_baseline(f32(2, 0, 5, 1), ["a", "a", "b", "b"])
    np.testing.assert_allclose(got, f32(1, -1, 2, -2) / sqrt(10 / 3), rtol=1e-6)


def test_reinforce_pp_baseline_keeps_groups_without_signal_out_of_the_batch():
    live, groups = f32(2, 0, 5, 1), ["a", "a", "b", "b"]
    lengths = f32(7, 3, 2, 5)  # by tokens the centred rewards have a mean that is not 0
    alone = reinforce_pp_baseline(live, groups, Context(lengths=lengths))
    beside = reinforce_pp_baseline(
        np.append(live, f32(0.7, 0.7, 9)), [*groups, "c", "c", "d"], Context(lengths=np.append(lengths, f32(1, 9, 4)))
    )
    np.testing.assert_array_equal(beside[:4], alone)
    assert beside[4:].tolist() == [0, 0, 0]


def test_running_baseline_is_a_value_that_the_run_keeps():
    mean = RunningMean()
    assert mean.mean is None
    np.testing.assert_allclose(reinforce_running(f32(1, 0), ["a", "b"], Context(running=mean.mean)), [0.5, -0.5])
    mean = mean.after([1.0, 0.0], decay=0.5)
    assert mean.mean == pytest.approx(0.5)  # no bias towards 0
    mean = mean.after([1.0], decay=0.5)
    assert mean.mean == pytest.approx((0.5 * 0.25 + 1.0 * 0.5) / 0.75)
    np.testing.assert_allclose(reinforce_running(f32(1), ["a"], Context(running=0.25)), [0.75])
    assert mean.after([]) == mean


def test_pass_at_k_by_hand():
    # 4 rollouts, 1 solved, k = 2: p = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2
    got = pass_at_k(f32(1, 0, 0, 0), ["g"] * 4, Context(k=2))
    # a failure sits in 3 pairs, of which 1 has the solved one: mean (solved - p) / s = (1/3 - 1/2) / (1/2) = -1/3
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


@given(solved=st.lists(st.booleans(), min_size=1, max_size=7), k=st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_sets_of_k(solved, k):
    from itertools import combinations

    n, k_of_group = len(solved), min(k, len(solved))
    sets = list(combinations(range(n), k_of_group))
    worth = [any(solved[i] for i in one) for one in sets]
    p = sum(worth) / len(worth)
    expected = np.zeros(n)
    if 0 < p < 1:
        for i in range(n):
            mine = [w for one, w in zip(sets, worth, strict=True) if i in one]
            expected[i] = (sum(mine) / len(mine) - p) / sqrt(p * (1 - p))
    got = pass_at_k(f32(*map(float, solved)), ["g"] * n, Context(k=k))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_pass_at_1_is_grpo_with_the_deviation_of_the_group_itself():
    rewards = f32(1, 0, 0, 1, 0)
    np.testing.assert_allclose(
        pass_at_k(rewards, ["g"] * 5, Context(k=1)), (rewards - rewards.mean()) / rewards.std(), rtol=1e-5
    )


def test_R02_ragged_interleaved_groups_by_id():
    rewards = f32(1, 5, 2, 0, 5, 4, 1, 5, 0, 3, 2)
    groups = ["a", "b", "c", "a", "b", "c", "a", "b", "c", "a", "c"]
    advantages = dr_grpo(rewards, groups)
    assert advantages[[1, 4, 7]].tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(advantages[[0, 3, 6, 9]], f32(1, 0, 1, 3) - 1.25)
    np.testing.assert_allclose(advantages[[2, 5, 8, 10]], f32(2, 4, 0, 2) - 2)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [5.0] * 4, [1 / 3] * 6, [42.0], [0.0]])
def test_R03_R10_equal_rewards_and_singletons_give_exact_zeros(name, rewards):
    alone = ESTIMATORS[name](f32(*rewards), ["g"] * len(rewards))
    assert alone.tolist() == [0.0] * len(rewards)
    beside = ESTIMATORS[name](f32(*rewards, 1, 0, 0, 0, 0), [*["g"] * len(rewards), *["h"] * 5])
    assert beside[: len(rewards)].tolist() == [0.0] * len(rewards)
    assert beside[len(rewards) :].any()


def test_leave_one_out_has_no_deviation_of_the_others_to_vanish():
    """With (r - mean of others) / (std of others + 1e-6) the odd one of 1, 0, 0, 0 gets an advantage of a million."""
    for name in BASELINES:
        advantages = ESTIMATORS[name](f32(1, 0, 0, 0), ["g"] * 4)
        assert np.abs(advantages).max() < 3, name


def test_the_config_knows_which_estimators_need_a_group():
    """Those, and only those, say nothing about a rollout that is alone."""
    silent = {name for name in OF_ROLLOUTS if not ESTIMATORS[name](f32(1, 0), ["a", "b"]).any()}
    assert silent == set(BASELINES)
    assert set(GROUP_BASELINES) <= set(ESTIMATORS)


@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_missing_ids_wrong_lengths_and_nan_are_refused(name):
    with pytest.raises(BatchError, match="no group id"):
        ESTIMATORS[name](f32(1, 0), ["g", ""])
    with pytest.raises(BatchError, match="one for each"):
        ESTIMATORS[name](f32(1, 0), ["g"])
    with pytest.raises(BatchError, match="not finite"):
        ESTIMATORS[name](f32(1, np.nan), ["g", "g"])
    assert ESTIMATORS[name](f32(), []).shape == (0,)
    numbered = ESTIMATORS[name](f32(1, 0, 1, 1), [0, 0, 1, 1])  # a notebook's groups: 0 is an id too
    np.testing.assert_array_equal(numbered, ESTIMATORS[name](f32(1, 0, 1, 1), ["a", "a", "b", "b"]))


@pytest.mark.parametrize("name", ["opo", "reinforce_pp", "reinforce_pp_baseline"])
def test_lengths_that_do_not_fit_are_refused(name):
    for lengths in (f32(1), f32(1, 0)):
        with pytest.raises(BatchError, match="trained tokens"):
            ESTIMATORS[name](f32(1, 0), ["g", "g"], Context(lengths=lengths))


@given(rewards=rewards_of, data=st.data())
@pytest.mark.parametrize("name", OF_ROLLOUTS)
def test_estimators_are_blind_to_order_and_never_explode(name, rewards, data):
    groups = data.draw(st.lists(st.sampled_from("ab"), min_size=len(rewards), max_size=len(rewards)))
    lengths = f32(*data.draw(st.lists(st.integers(1, 50), min_size=len(rewards), max_size=len(rewards))))
    order = list(data.draw(st.permutations(range(len(rewards)))))
    if name == "grpo_passk" and len(set(rewards)) < len(rewards):
        return  # of two equally good the first is the best
    advantages = ESTIMATORS[name](f32(*rewards), groups, Context(lengths=lengths))
    shuffled = ESTIMATORS[name](
        f32(*[rewards[i] for i in order]), [groups[i] for i in order], Context(lengths=lengths[order])
    )
    np.testing.assert_allclose(shuffled, advantages[order], rtol=1e-5, atol=1e-6)
    assert np.abs(advantages).max() < 30  # never ±1e6 from a vanishing deviation
    if name in CENTRED:
        for group in set(groups):
            assert abs(sum(a for a, g in zip(advantages, groups, strict=True) if g == group)) < 1e-4


@pytest.mark.parametrize("name", BASELINES)
def test_sums_that_are_equal_on_paper_are_equal(name):
    """0.1 + 0.2 is not 0.3 in any precision; the last bit is no signal, and no deviation to divide by."""
    for kind in (np.float32, np.float64):
        odd = np.array([float(kind(0.1)) + float(kind(0.2)), kind(0.3), kind(0.3)], dtype=np.float64)
        assert odd.min() != odd.max()
        assert ESTIMATORS[name](odd, ["g"] * 3).tolist() == [0.0] * 3
    near = f32(1000, 1000.01, 1000)
    assert name == "pass_at_k" or ESTIMATORS[name](near, ["g"] * 3).any()  # a small difference is a difference


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_threshold_that_float32_can_not_hold_is_met_by_itself(kind):
    rewards = np.array([0.7, 0.6, 0.6, 0.1], dtype=kind)
    assert pass_at_k(rewards, ["g"] * 4, Context(k=1, success=0.7)).tolist()[0] > 0


def test_credit_is_reckoned_in_float64():
    """The rewards of a group may be large and their differences small."""
    rewards = np.array([1e6 + 1, 1e6, 1e6 + 2])
    assert dr_grpo(rewards, ["g"] * 3).tolist() == [0.0, -1.0, 1.0]
    assert grpo(rewards, ["g"] * 3).tolist() == pytest.approx([0.0, -1.0, 1.0], rel=2e-6)
    lengths = np.array([1.0, 2.0, 3.0])
    got = reinforce_pp(rewards, ["g"] * 3, Context(lengths=lengths))
    assert (lengths * got).sum() == pytest.approx(0, abs=1e-8)
    assert (lengths * got**2).sum() / 5 == pytest.approx(1, rel=1e-7)
