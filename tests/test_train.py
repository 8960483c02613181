"""The parts of the loop that are plain functions. The loop itself is tested whole in tests/e2e."""

from collections import Counter

import pytest

from outrider.config import parse
from outrider.train import Timer, learning_rate, plan_step
from outrider.types import Task

TREE = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}, "train": {"groups": 3, "group_size": 2}}
TASKS = [Task(id=f"t{i}", fields={}) for i in range(7)]


def test_a_step_asks_for_the_same_rollouts_whenever_it_is_asked():
    config = parse(TREE)
    assert plan_step(config, TASKS, 5) == plan_step(config, TASKS, 5)
    other = parse(TREE, ["seed=1"])
    assert any(plan_step(config, TASKS, s) != plan_step(other, TASKS, s) for s in range(1, 5))


def test_every_task_is_used_once_before_any_is_used_again():
    config = parse(TREE)
    groups = [
        group for step in range(1, 8) for group in dict.fromkeys(r.group_id for r in plan_step(config, TASKS, step))
    ]
    used = {r.group_id: r.task.id for step in range(1, 8) for r in plan_step(config, TASKS, step)}
    assert len(groups) == 21
    assert Counter(used.values()) == dict.fromkeys((task.id for task in TASKS), 3)
    assert len({used[group] for group in groups[:7]}) == 7


def test_groups_are_told_apart_even_when_a_step_meets_a_task_twice():
    config = parse(TREE, ["train.groups=8"])  # more than there are tasks
    rollouts = plan_step(config, TASKS, 1)
    assert len({r.id for r in rollouts}) == 16
    assert set(Counter(r.group_id for r in rollouts).values()) == {2}


def test_warm_up_rises_to_the_peak_and_stays():
    assert [learning_rate(1.0, 3, step) for step in (1, 2, 3, 4, 5, 50)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(2e-5, 0, 1) == 2e-5


def test_the_parts_of_a_step_add_up_to_its_total():
    timer = Timer()
    timer.lap("rollouts")
    timer.skip()
    timer.lap("rollouts")
    times = timer.times()
    assert times["total"] == pytest.approx(times["rollouts"] + times["rest"])
    assert times["rest"] >= 0
