"""The parts of the loop that are plain functions. The loop itself is tested whole in tests/e2e."""

import json
from collections import Counter

import pytest

from outrider.config import parse
from outrider.dialects.openai_completions import OpenAICompletions
from outrider.engines.embedded.requests import Limits, parse_body, parse_completion
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


def test_R05_training_rollouts_are_sampled_from_what_the_trainer_computes():
    """Whatever the agent asks for, the engine gets the whole distribution, and no seed that a group would share."""
    asked = {"temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "presence_penalty": 1.5}
    body = {"prompt": [1, 2], "repetition_penalty": 1.1, "frequency_penalty": 1, **asked}
    rollout, _ = plan_group(parse(TREE, ["train.temperature=0.5"]), TASKS[0], 0)
    dialect = OpenAICompletions()
    sent = dialect.prepare(dialect.parse(json.dumps(body).encode()), overrides=rollout.sampling, tokens=True)
    limits = Limits(model="policy", vocabulary=9, max_model_len=99)
    sampling = parse_completion(parse_body(sent.body), None, limits).sampling  # which refuses what it can't do
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 1.0, 0, None)
    assert sent.sampling == rollout.sampling  # and so it is recorded


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
