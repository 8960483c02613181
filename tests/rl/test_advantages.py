from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BatchError
from outrider.rl.advantages import ESTIMATORS, UNITS, dr_grpo, grpo, reinforce, rloo

BASELINES = ("grpo", "dr_grpo", "rloo")
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
    np.testing.assert_array_equal(reinforce(rewards, groups), rewards)


def test_R02_ragged_interleaved_groups_by_id():
    rewards = f32(1, 5, 2, 0, 5, 4, 1, 5, 0, 3, 2)
    groups = ["a", "b", "c", "a", "b", "c", "a", "b", "c", "a", "c"]
    advantages = dr_grpo(rewards, groups)
    assert advantages[[1, 4, 7]].tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(advantages[[0, 3, 6, 9]], f32(1, 0, 1, 3) - 1.25)
    np.testing.assert_allclose(advantages[[2, 5, 8, 10]], f32(2, 4, 0, 2) - 2)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.7] * 7, [5.0] * 4, [1 / 3] * 6, [42.0]])
def test_R03_R10_equal_rewards_and_singletons_give_exact_zeros(name, rewards):
    advantages = ESTIMATORS[name](f32(*rewards), ["g"] * len(rewards))
    assert advantages.tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - set(UNITS)))
def test_missing_ids_wrong_lengths_and_nan_are_refused(name):
    with pytest.raises(BatchError, match="no group id"):
        ESTIMATORS[name](f32(1, 0), ["g", ""])
    with pytest.raises(BatchError, match="one for each"):
        ESTIMATORS[name](f32(1, 0), ["g"])
    with pytest.raises(BatchError, match="not finite"):
        ESTIMATORS[name](f32(1, np.nan), ["g", "g"])
    assert ESTIMATORS[name](f32(), []).shape == (0,)


@given(rewards=rewards_of, data=st.data())
@pytest.mark.parametrize("name", BASELINES)
def test_group_baselines_are_centred_and_blind_to_order(name, rewards, data):
    groups = data.draw(st.lists(st.sampled_from("ab"), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    advantages = ESTIMATORS[name](f32(*rewards), groups)
    shuffled = ESTIMATORS[name](f32(*[rewards[i] for i in order]), [groups[i] for i in order])
    np.testing.assert_allclose(shuffled, advantages[list(order)], rtol=1e-5, atol=1e-6)
    for group in set(groups):
        assert abs(sum(a for a, g in zip(advantages, groups, strict=True) if g == group)) < 1e-4
    assert np.abs(advantages).max() < 20  # never ±1e6 from a vanishing deviation
