"""Held-out measurement."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.evaluate import clustered, plan, score, summarise, wilson
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


@given(st.lists(st.booleans(), max_size=40))
def test_one_try_a_task_is_wilsons_interval(solved):
    assert clustered([(int(one), 1) for one in solved]) == pytest.approx(wilson(sum(solved), len(solved)))


def test_tries_that_agree_count_as_one_and_unlike_ones_as_many():
    together = [(4, 4)] * 6 + [(0, 4)] * 4
    assert clustered(together) == pytest.approx(wilson(6, 10))
    assert clustered([(4, 4)] * 10) == pytest.approx(wilson(10, 10))  # nothing says that they would ever differ
    assert clustered([(2, 4)] * 10) == pytest.approx(wilson(20, 40))
    assert clustered([(3, 4)]) == pytest.approx(wilson(0.75, 1))  # one task says little of others
    assert clustered([(0, 0)]) == clustered([]) == (0.0, 1.0)
    uneven = [(5, 5), (0, 1), (1, 1), (0, 3)]
    low, high = clustered(uneven)
    assert wilson(6, 10)[0] > low > 0
    assert wilson(6, 10)[1] < high < 1


@given(st.lists(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), min_size=1, max_size=20))
def test_a_clustered_interval_is_never_narrower_than_wilsons(counts):
    successes, n = sum(s for s, _ in counts), sum(tries for _, tries in counts)
    plain, (low, high) = wilson(successes, n), clustered(counts)
    assert 0 <= low <= plain[0] + 1e-12
    assert plain[1] - 1e-12 <= high <= 1


@pytest.mark.parametrize(
    ("tasks", "samples", "mean", "alike"),
    [(20, 4, 0.5, 0.5), (50, 8, 0.9, 0.8), (100, 4, 0.3, 0.95), (200, 2, 0.9, 0.3), (50, 4, 0.5, 0.0)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(tasks, samples, mean, alike):
    """Tasks whose own rates are beta-distributed; `alike` is the correlation of two tries of a task."""
    rng, repeats, hits, naive = np.random.default_rng(0), 400, 0, 0
    for _ in range(repeats):
        spread = (1 - alike) / alike if alike else 1e9
        solved = rng.binomial(samples, rng.beta(mean * spread, (1 - mean) * spread, tasks))
        low, high = clustered([(int(count), samples) for count in solved])
        hits += low <= mean <= high
        low, high = wilson(int(solved.sum()), tasks * samples)
        naive += low <= mean <= high
    assert 0.91 < hits / repeats < 0.99
    assert naive / repeats < 0.8 or alike < 0.5  # what was wrong with counting every try


def test_tries_of_a_task_are_found_by_its_id():
    def rollout(task, number, reward):
        return Rollout(id=f"{task}-{number}", task=Task(id=task, fields={}), group_id=task, reward=reward)

    rollouts = [rollout(task, i, float(task in "abc")) for i in range(3) for task in "abcde"]
    got = summarise([*rollouts, rollout("a", 9, None)], threshold=1.0)
    assert (got["low"], got["high"]) == pytest.approx(wilson(3, 5))
    assert (got["n"], got["tasks"], got["success"], got["unscored"]) == (15, 5, 0.6, 1)


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
