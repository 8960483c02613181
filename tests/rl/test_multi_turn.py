"""Rollouts of several calls, from what was recorded to advantages: rewards on the way, policies beside the trained one,
rows that the length rule cuts."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.calls import call
from outrider.rl.advantages import ESTIMATORS, Context
from outrider.rl.batch import NOTHING_TRAINABLE, Batch, make_batch
from outrider.rl.credit import Evidence
from outrider.trajectory import build
from outrider.types import Call, Sample


def samples(rollout: str, calls: list[Call], left_out: dict[str, str] | None = None, **rule) -> list[Sample]:
    return list(build(calls, left_out).samples(rollout_id=rollout, group_id="g", **rule).samples)


def batch(rollouts: dict[str, list[Sample]], rewards: dict[str, float | None], of_calls=None, **options) -> Batch:
    given = {name: np.array(values, dtype=np.float32) for name, values in (of_calls or {}).items()}
    rows = [sample for made in rollouts.values() for sample in made]
    return make_batch(rows, rewards, dict.fromkeys(rewards, "g"), evidence=Evidence(call_rewards=given), **options)


def of_call(made: Batch, rollout: str) -> dict[int, float]:
    """The advantage of each trained call of a rollout."""
    found: dict[int, set[float]] = {}
    for row in made.rows:
        if row.sample.rollout_id == rollout:
            for index, value in zip(row.sample.call_index, row.advantages, strict=True):
                if index >= 0:
                    found.setdefault(int(index), set()).add(float(value))
    assert all(len(values) == 1 for values in found.values())  # all tokens of a call have its advantage
    return {index: values.pop() for index, values in sorted(found.items())}


def three_turns(answers: tuple[int, int, int]) -> list[Call]:
    """One conversation, each prompt the one before with its answer and what the tool said."""
    prompt, calls = [1, 2], []
    for number, answer in enumerate(answers):
        calls.append(call(prompt, [answer, 9], seq=number + 1))
        prompt = [*prompt, answer, 9, 5]
    return calls


TWO = {"r": three_turns((10, 11, 12)), "s": three_turns((20, 21, 22))}
REWARDS = {"r": 1.0, "s": 0.0}


def test_rewards_on_the_way_and_at_the_end_with_a_discount():
    rollouts = {name: samples(name, calls) for name, calls in TWO.items()}
    made = batch(
        rollouts,
        REWARDS,
        {"r": [0.5, 0.0, 0.25], "s": [0.0, 1.0, 0.0]},
        estimator="return_to_go",
        context=Context(gamma=0.5),
    )
    # r earns 0.5, 0, 0.25 + 1: returns 0.8125, 0.625, 1.25; s earns 0, 1, 0: returns 0.5, 1, 0
    assert of_call(made, "r") == {0: 0.15625, 1: -0.1875, 2: 0.625}
    assert of_call(made, "s") == {0: -0.15625, 1: 0.1875, 2: -0.625}


def test_a_reward_that_comes_late_counts_from_its_call_back():
    rollouts = {name: samples(name, calls) for name, calls in TWO.items()}
    options = {"estimator": "return_to_go", "context": Context(gamma=0.5)}
    before = batch(rollouts, REWARDS, {"s": [0.0, 0.0, 0.0]}, **options)
    after = batch(rollouts, REWARDS, {"s": [0.0, 1.0, 0.0]}, **options)
    change = {index: after_ - of_call(before, "s")[index] for index, after_ in of_call(after, "s").items()}
    assert change == {0: 0.25, 1: 0.5, 2: 0.0}  # half of it, as the other half is in the baseline


def test_another_policys_call_earns_for_the_one_before():
    """A second model plans in between. Its tokens are not trained; what it earned our policy had led to."""
    planner = call([7, 7], [70, 71, 9], seq=2, model="planner")
    ours = [call([1, 2], [10, 9], seq=1), call([1, 2, 10, 9, 5], [11, 9], seq=3)]
    mixed = samples("r", [ours[0], planner, ours[1]], {"c2": "another policy"})
    alone = samples("s", [call([1, 2], [20, 9], seq=1), call([1, 2, 20, 9, 5], [21, 9], seq=2)])
    assert sum(int(row.loss_mask.sum()) for row in mixed) == 4
    made = batch(
        {"r": mixed, "s": alone},
        {"r": 0.0, "s": 0.0},
        {"r": [0.0, 1.0, 0.0], "s": [0.0, 0.0]},
        estimator="return_to_go",
    )
    assert of_call(made, "r") == {0: 0.5, 2: 0.0}
    assert of_call(made, "s") == {0: -0.5, 1: 0.0}
    weights = {name: sum(r.weights.sum() for r in made.rows if r.sample.rollout_id == name) for name in "rs"}
    assert weights["r"] == pytest.approx(weights["s"])


def test_what_a_call_earned_that_the_length_rule_cut_goes_to_the_last_one_left():
    cut = samples("r", TWO["r"], max_tokens=9, too_long="keep_start")
    assert [int(index) for index in np.unique(cut[0].call_index[cut[0].loss_mask])] == [0, 1]
    rollouts = {"r": cut, "s": samples("s", TWO["s"])}
    made = batch(rollouts, REWARDS, {"r": [0.0, 0.0, 2.0]}, estimator="return_to_go")
    # r's returns are 3 and 3; s's 0, 0, 0, beside whose third call r counts with its last
    assert of_call(made, "r") == {0: 1.5, 1: 1.5}
    assert of_call(made, "s") == {0: -1.5, 1: -1.5, 2: -1.5}


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_R03_a_rollout_whose_rows_are_all_too_long_is_as_if_it_had_not_been(estimator):
    plain = {name: samples(name, calls) for name, calls in TWO.items()}
    gone = samples("t", three_turns((30, 31, 32)), max_tokens=3, too_long="drop")
    assert gone == []
    options = {"estimator": estimator, "context": Context(k=1, gamma=0.5, running=0.25)}

    def made(rollouts, rewards):
        rows = [sample for rows in rollouts.values() for sample in rows]
        values = [np.where(row.loss_mask, 0.25, 0).astype(np.float32) for row in rows]
        evidence = Evidence(values=values, call_rewards={"t": np.ones(3, np.float32)})
        return make_batch(rows, rewards, dict.fromkeys(rewards, "g"), evidence=evidence, **options)

    one, other = made(plain, REWARDS), made(plain | {"t": gone}, REWARDS | {"t": 100.0})
    assert other.excluded - one.excluded == {NOTHING_TRAINABLE: 1}
    assert other.advantages == one.advantages
    for row, same in zip(other.rows, one.rows, strict=True):
        np.testing.assert_array_equal(row.advantages, same.advantages)
        np.testing.assert_array_equal(row.weights, same.weights)
