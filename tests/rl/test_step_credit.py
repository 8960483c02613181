"""Credit step by step: the estimators, and the steps that are read off samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BatchError
from outrider.rl.advantages import ESTIMATORS, Context, Steps, dr_gigpo, dr_grpo, gae, gigpo, grpo, return_to_go
from outrider.rl.advantages.steps import discounted
from outrider.rl.batch import make_batch
from outrider.rl.credit import Evidence
from outrider.rl.steps import by_call, by_token, context, observation
from outrider.types import Sample


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def steps(rollout, rewards, **more) -> Steps:
    return Steps(rollout=np.array(rollout, dtype=np.int64), rewards=f32(*rewards), **more)


def talk(rollout: str, group: str, *calls: tuple[list[int], list[int]], first_call: int = 0) -> Sample:
    """A row of calls, each with the context that is new to it and the tokens that were sampled."""
    ids, mask, index = [], [], []
    for number, (asked, answered) in enumerate(calls):
        ids += [*asked, *answered]
        mask += [False] * len(asked) + [True] * len(answered)
        index += [-1] * len(asked) + [first_call + number] * len(answered)
    trained = np.array(mask)
    return Sample(
        rollout_id=rollout,
        group_id=group,
        attempt_id=f"{rollout}.a1",
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=trained,
        logprobs=np.where(trained, -0.5, 0).astype(np.float32),
        versions=np.where(trained, 0, -1).astype(np.int32),
        call_index=np.array(index, dtype=np.int32),
    )


def batch(samples, rewards, **options):
    return make_batch(samples, rewards, {sample.rollout_id: sample.group_id for sample in samples}, **options)


# -- estimators --------------------------------------------------------------------------------------------------------


def test_returns_to_go_by_hand():
    assert discounted(f32(1, 2, 4, 8), np.array([0, 0, 0, 1]), 0.5).tolist() == [3.0, 4.0, 4.0, 8.0]


def test_return_to_go_by_hand():
    context = Context(steps=steps([0, 0, 1], [1, 3, 2]), gamma=0.5)
    # returns 2.5, 3 | 2; at the second step the other rollout still counts with its 2
    got = return_to_go(f32(0, 0), ["g", "g"], context)
    np.testing.assert_allclose(got, f32(2.5 - 2.25, 3 - 2.5, 2 - 2.25), rtol=1e-6)


@given(rewards=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=6), data=st.data())
def test_a_reward_at_the_end_alone_makes_it_dr_grpo(rewards, data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=len(rewards), max_size=len(rewards)))
    rollout = np.repeat(np.arange(len(rewards)), counts)
    last = np.cumsum(counts) - 1
    earned = np.zeros(len(rollout))
    earned[last] = rewards
    got = return_to_go(f32(*rewards), ["g"] * len(rewards), Context(steps=steps(rollout, earned)))
    np.testing.assert_allclose(got, dr_grpo(f32(*rewards), ["g"] * len(rewards))[rollout], atol=1e-6)


def test_gigpo_by_hand():
    # two rollouts start in the same state; the first earns at once, the second later, less by then
    states = ("start", "left", "start", "right")
    context = Context(steps=steps([0, 0, 1, 1], [1, 0, 0, 1], states=states), gamma=0.5, step_weight=2.0)
    got = gigpo(f32(0, 0), ["g", "g"], context)
    start = grpo(f32(1, 0.5), ["s", "s"])  # returns to go from the shared state; the totals are equal
    np.testing.assert_allclose(got, [2 * start[0], 0, 2 * start[1], 0], rtol=1e-6)
    plain = gigpo(f32(0, 0), ["g", "g"], replace(context, steps=steps([0, 1], [1, 0], states=("a", "b"))))
    np.testing.assert_allclose(plain, grpo(f32(1, 0), ["g", "g"]), rtol=1e-6)
    # totals 1 and 1; from the shared state 1 and 0.5
    np.testing.assert_allclose(dr_gigpo(f32(0, 0), ["g", "g"], context), [0.5, 0, -0.5, 0], rtol=1e-6)


def test_gigpo_compares_no_state_with_another_groups_and_no_empty_key():
    one = gigpo(f32(0, 0), ["g", "h"], Context(steps=steps([0, 1], [1, 0], states=("s", "s"))))
    other = gigpo(f32(0, 0), ["g", "g"], Context(steps=steps([0, 1], [1, 0], states=("", "")), step_weight=100))
    assert one.tolist() == [0, 0]
    np.testing.assert_allclose(other, grpo(f32(1, 0), ["g", "g"]), rtol=1e-6)


def test_gae_by_hand():
    context = Context(steps=steps([0, 0, 1], [1, 2, 5], values=f32(0.5, 1, 3)), gamma=0.9, lam=0.5)
    # errors: 1 + 0.9 * 1 - 0.5 = 1.4, 2 - 1 = 1, 5 - 3 = 2; advantages: 1.4 + 0.45 * 1, 1, 2
    np.testing.assert_allclose(gae(f32(0, 0), ["g", "h"], context), [1.85, 1, 2], rtol=1e-6)


def test_gae_with_a_blind_critic_and_lambda_1_is_the_return():
    earned = f32(0.5, 0, 2, 1)
    context = Context(steps=steps([0, 0, 0, 1], earned, values=np.zeros(4, np.float32)), gamma=0.9)
    np.testing.assert_allclose(gae(f32(0, 0), ["g", "h"], context), discounted(earned, context.steps.rollout, 0.9))


@pytest.mark.parametrize("name", ["return_to_go", "gigpo", "dr_gigpo"])
def test_R03_R10_equal_rollouts_and_singletons_give_exact_zeros(name):
    same = steps([0, 0, 1, 1, 2, 2], [0.1, 0.7] * 3, states=("s", "t") * 3)
    assert ESTIMATORS[name](f32(0, 0, 0), ["g"] * 3, Context(steps=same, gamma=0.9)).tolist() == [0.0] * 6
    sparse = steps([0, 1, 1, 2], [0.1, 0, 0.1, 0.1], states=("s", "t", "s", "u"))
    assert ESTIMATORS[name](f32(0, 0, 0), ["g"] * 3, Context(steps=sparse)).tolist() == [0.0] * 4
    alone = steps([0, 0], [1, 3], states=("s", "t"))
    assert ESTIMATORS[name](f32(0), ["g"], Context(steps=alone)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ["return_to_go", "gigpo", "gae"])
def test_steps_that_do_not_fit_are_refused(name):
    estimate, values, states = ESTIMATORS[name], f32(0), ("s",)
    with pytest.raises(BatchError, match=r"context\.steps is missing"):
        estimate(f32(1), ["g"])
    for rollout in ([1], [], [0, 0]):
        with pytest.raises(BatchError, match="steps"):
            estimate(f32(1), ["g"], Context(steps=steps(rollout, [1], values=values, states=states)))
    with pytest.raises(BatchError, match="ascending"):
        estimate(f32(1, 1), ["g", "g"], Context(steps=steps([1, 0], [1, 1], values=f32(0, 0), states=("s", "s"))))
    with pytest.raises(BatchError, match="not finite"):
        estimate(f32(1), ["g"], Context(steps=steps([0], [np.nan], values=values, states=states)))


def test_a_critic_and_state_keys_are_asked_for():
    with pytest.raises(BatchError, match="critic"):
        gae(f32(1), ["g"], Context(steps=steps([0], [1])))
    with pytest.raises(BatchError, match="state keys"):
        gigpo(f32(1), ["g"], Context(steps=steps([0], [1])))


# -- steps of samples --------------------------------------------------------------------------------------------------


def test_calls_of_a_rollout_in_order_whatever_rows_they_are_in():
    main = talk("r", "g", ([1, 2], [3, 4]), ([5], [6]))
    sub = talk("r", "g", ([9], [8, 7]), first_call=2)
    layout = by_call(["r"], [sub, main], f32(10), {"r": f32(1, 2, 3)})
    assert layout.steps.rewards.tolist() == [1, 2, 13]  # the rollout's own reward comes with its last call
    assert layout.of_token[0].tolist() == [-1, 2, 2]
    assert layout.of_token[1].tolist() == [-1, -1, 0, 0, -1, 1]
    assert layout.spread(f32(7, 8, 9), 1).tolist() == [0, 0, 7, 7, 0, 8]


def test_a_reward_of_a_call_that_is_not_trained_goes_to_the_one_before():
    row = talk("r", "g", ([1], [2]), first_call=2)
    later = replace(row, call_index=np.where(row.loss_mask, 4, -1).astype(np.int32))
    layout = by_call(["r"], [row, later], f32(0), {"r": f32(100, 100, 1, 10, 2, 20)})
    assert layout.steps.rewards.tolist() == [11, 22]  # calls 0 and 1 came before any action of ours


def test_late_rewards_and_none_at_all():
    row = talk("r", "g", ([1], [2]), ([3], [4]))
    assert by_call(["r"], [row], f32(1), {}).steps.rewards.tolist() == [0, 1]
    assert by_call(["r"], [row], f32(0), {"r": f32(5)}).steps.rewards.tolist() == [5, 0]
    with pytest.raises(BatchError, match="not finite"):
        by_call(["r"], [row], f32(0), {"r": f32(np.nan)})


def test_states_are_what_the_call_was_asked_or_the_whole_past():
    one, other = talk("r", "g", ([1, 2], [3]), ([5], [6])), talk("s", "g", ([1, 2], [4]), ([5], [7]))
    keys = by_call(["r", "s"], [one, other], f32(0, 0), {}, state=observation).steps.states
    assert keys[0] == keys[2]
    assert keys[1] == keys[3]
    assert keys[0] != keys[1]
    keys = by_call(["r", "s"], [one, other], f32(0, 0), {}, state=context).steps.states
    assert keys[0] == keys[2]
    assert keys[1] != keys[3]


def test_tokens_in_the_order_they_were_sampled():
    row = talk("r", "g", ([1, 2], [3, 4]), ([5], [6, 7]))
    values, penalties = [np.arange(7, dtype=np.float32)], [np.full(7, 0.5, np.float32)]
    layout = by_token(["r"], [row], f32(10), {"r": f32(1, 2)}, values=values, penalties=penalties)
    assert layout.steps.rewards.tolist() == [-0.5, 0.5, -0.5, 11.5]
    assert layout.steps.values.tolist() == [2, 3, 5, 6]
    by_calls = by_call(["r"], [row], f32(10), {"r": f32(1, 2)}, values=values, penalties=penalties)
    assert by_calls.steps.rewards.tolist() == [0, 11]
    assert by_calls.steps.values.tolist() == [2, 5]


def test_several_answers_of_one_call_are_not_mixed_token_by_token():
    one, other = talk("r", "g", ([1, 2], [3, 4])), talk("r", "g", ([1, 2], [5, 6, 7]))
    layout = by_token(["r"], [one, other], f32(1), {"r": f32(2)})
    assert layout.of_token[0].tolist() == [-1, -1, 0, 1]
    assert layout.of_token[1].tolist() == [-1, -1, 2, 3, 4]
    assert layout.steps.rewards.tolist() == [0, 0, 0, 0, 3]


# -- batches -----------------------------------------------------------------------------------------------------------


def two_turns(**options):
    samples = [talk("r", "g", ([1], [2, 3]), ([4], [5])), talk("s", "g", ([1], [2]), ([4], [9, 9]))]
    return samples, batch(samples, {"r": 1.0, "s": 0.0}, **options)


def test_each_call_has_its_own_advantage():
    evidence = Evidence(call_rewards={"r": f32(4, 0), "s": f32(0, 2)})
    _, made = two_turns(estimator="return_to_go", evidence=evidence)
    # returns r: 5, 1; s: 2, 2
    assert made.rows[0].advantages.tolist() == [0, 1.5, 1.5, 0, -0.5]
    assert made.rows[1].advantages.tolist() == [0, -1.5, 0, 0.5, 0.5]
    assert made.advantages["r"] == pytest.approx((1.5 + 1.5 - 0.5) / 3)
    assert made.groups_trained == 1


@pytest.mark.parametrize("name", ["gae", "gae_call"])
def test_a_critic_gets_returns_and_whitened_advantages(name):
    values = [np.array([0, 0.5, 0.5, 0, 0.25], np.float32), np.array([0, 0.5, 0, 0.25, 0.25], np.float32)]
    samples, made = two_turns(
        estimator=name, evidence=Evidence(values=values), context=Context(gamma=1.0, lam=1.0), normalisation="token"
    )
    for row, reward, value in zip(made.rows, (1.0, 0.0), values, strict=True):
        np.testing.assert_allclose(row.returns, np.where(row.sample.loss_mask, reward, 0), atol=1e-6)
        np.testing.assert_array_equal(row.old_values, value)
    tokens = np.concatenate([row.advantages[row.sample.loss_mask] for row in made.rows])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.var(ddof=1) == pytest.approx(1, abs=1e-5)
    raw = np.array([0.5, 0.5, 0.75, -0.5, -0.25, -0.25])
    np.testing.assert_allclose(tokens, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-5)
    assert all(row.old_logprobs is None for row in made.rows)
    assert len(samples) == len(made.rows)


@given(data=st.data(), name=st.sampled_from(["return_to_go", "gigpo", "gae", "gae_call", "grpo", "reinforce_pp"]))
def test_splitting_a_rollout_into_rows_moves_no_tokens_advantage(data, name):
    """A row for each call, in any order: what a tree gives where every prompt opens a new branch."""
    whole, parts = [], []
    for number in range(data.draw(st.integers(2, 4))):
        calls = [([1, 2], [3] * data.draw(st.integers(1, 3))) for _ in range(data.draw(st.integers(1, 3)))]
        row = talk(f"r{number}", "g", *calls)
        whole.append(row)
        for call in range(len(calls)):
            mask = row.call_index == call
            parts.append(replace(row, loss_mask=mask, call_index=np.where(mask, call, -1).astype(np.int32)))
    parts = data.draw(st.permutations(parts))
    rewards = {row.rollout_id: data.draw(st.sampled_from([0.0, 0.5, 1.0])) for row in whole}
    calls = {row.rollout_id: f32(*data.draw(st.lists(st.sampled_from([0.0, 0.3]), max_size=3))) for row in whole}

    def credit(samples):
        values = [np.where(s.loss_mask, 0.1 * np.arange(len(s.token_ids)), 0).astype(np.float32) for s in samples]
        evidence = Evidence(call_rewards=calls, values=values, state=context)
        made = batch(samples, rewards, estimator=name, evidence=evidence, context=Context(gamma=0.9, lam=0.8))
        total: dict[str, np.ndarray] = {}
        for row in made.rows:
            product = row.weights.astype(np.float64) * row.advantages
            total[row.sample.rollout_id] = total.get(row.sample.rollout_id, 0) + product
        return total

    one, other = credit(whole), credit(parts)
    assert one.keys() == other.keys()
    for rollout, values in one.items():
        np.testing.assert_allclose(other[rollout], values, rtol=1e-5, atol=1e-7)


def test_evidence_that_does_not_fit_is_refused():
    with pytest.raises(BatchError, match=r"evidence\.values"):
        two_turns(estimator="gae", evidence=Evidence(values=[f32(1)]))
    with pytest.raises(BatchError, match=r"evidence\.penalties"):
        two_turns(evidence=Evidence(penalties=[f32(1), f32(1)]))


def test_penalties_come_off_the_reward():
    penalties = [np.array([9, 0.25, 0.25, 9, 0.5], np.float32), np.zeros(5, np.float32)]  # context pays nothing
    _, made = two_turns(estimator="reinforce", evidence=Evidence(penalties=penalties))
    assert made.advantages == {"r": 0.0, "s": 0.0}
    _, made = two_turns(estimator="dr_grpo", evidence=Evidence(penalties=[p * 2 for p in penalties]))
    assert made.advantages == {"r": -0.5, "s": 0.5}
