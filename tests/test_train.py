"""The parts of the loop that are plain functions. The loop itself is tested whole in tests/e2e."""

from collections import Counter

import pytest

from outrider.config import parse
from outrider.learn import learning_rate
from outrider.metrics import Timer
from outrider.train import plan_group
from outrider.types import Task

TREE = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}, "train": {"groups": 3, "group_size": 2}}
TASKS = [Task(id=f"t{i}", fields={}) for i in range(7)]


def test_a_group_is_the_same_whenever_it_is_asked_for():
    config = parse(TREE)
    assert plan_group(config, TASKS[0], 7) == plan_group(config, TASKS[0], 7)
    assert [r.id for r in plan_group(config, TASKS[0], 7)] == ["step-0003-001-0", "step-0003-001-1"]


def test_groups_are_told_apart_even_when_a_step_meets_a_task_twice():
    config = parse(TREE)
    rollouts = [r for index in (0, 1) for r in plan_group(config, TASKS[0], index)]
    assert len({r.id for r in rollouts}) == 4
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
