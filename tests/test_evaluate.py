"""Held-out measurement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.evaluate import plan, score, summarise, wilson
from outrider.types import Mode, Rollout, RolloutState, Task

TASKS = [Task(id=str(i), fields={}) for i in range(3)]


@given(st.integers(0, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_holds_the_proportion_and_stays_in_bounds(pair):
    successes, n = pair
    low, high = wilson(successes, n)
    assert 0 <= low <= high <= 1
    if n:
        assert low <= successes / n + 1e-12
        assert successes / n <= high + 1e-12


def test_interval_agrees_with_a_table():
    # 15 of 20: Wilson's interval is 0.531 to 0.888 (Newcombe 1998 works such examples)
    assert wilson(15, 20) == pytest.approx((0.531, 0.888), abs=5e-4)


def test_plan_is_greedy_once_and_sampled_as_often_as_asked():
    rollouts = plan("before", 0, TASKS, samples=2)
    assert len({rollout.id for rollout in rollouts}) == len(rollouts) == 9
    assert all(rollout.mode is Mode.EVAL for rollout in rollouts)
    assert {r.split: r.sampling for r in rollouts} == {
        "before/greedy": {"temperature": 0.0},
        "before/sampled": {"temperature": 1.0, "seed": None},  # a seed of the harness would make both the same
    }


def test_the_same_name_at_another_step_is_another_rollout():
    assert not {r.id for r in plan("after", 8, TASKS, 1)} & {r.id for r in plan("after", 9, TASKS, 1)}


def test_R03_unscored_rollouts_are_counted_and_are_no_zeros():
    base = Rollout(id="a", task=TASKS[0], group_id="g", state=RolloutState.SUCCEEDED, reward=1.0)
    failed = Rollout(id="b", task=TASKS[1], group_id="g", state=RolloutState.FAILED)
    got = summarise([base, failed], threshold=1.0)
    assert (got["success"], got["n"], got["unscored"], got["reward_mean"]) == (1.0, 1, 1, 1.0)


def test_nothing_scored_is_no_claim():
    got = summarise([], threshold=1.0)
    assert (got["n"], got["low"], got["high"]) == (0, 0.0, 1.0)


def test_records_are_ranked_by_greedy_success_then_by_sampled():
    def record(greedy, sampled):
        return {
            kind: {"success": rate or 0.0, "n": 0 if rate is None else 10}
            for kind, rate in (("greedy", greedy), ("sampled", sampled))
        }

    assert score(record(0.5, 0.25)) == (0.5, 0.25)
    assert score(record(0.5, None)) == (0.5, 0.5)
    assert score(record(None, None)) is None
