"""Steps with nothing to learn, with a filter, or with a gradient that says nothing."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

from fakes.scripted_run import Run
from outrider.protocols import OptimStats
from outrider.types import Score


def by_member(episode):
    """1 for one member of each group, 0 for the other."""
    return float(episode.attempt.rollout_id.endswith("-1"))


def check_skipped(run, record):
    assert record["skipped"] is True
    assert (record["loss"], record["tokens"]) == (0.0, 0)
    assert record["policy_version"] == 0
    assert (run.backend.weights, run.backend.batches) == (0, [])
    assert (run.engine.loads, run.gateway.version) == (0, 0)
    assert any("has nothing to learn from" in text for text in run.listener.messages)


def test_R10_a_step_whose_groups_are_all_equal_changes_nothing_and_keeps_the_version(tmp_path):
    run = Run(tmp_path / "run", lambda episode: 1.0, steps=1)
    run()
    (record,) = run.steps()
    check_skipped(run, record)
    assert record["excluded"] == {"rollout: group without signal": 4}


def test_R10_a_step_without_a_trainable_token_changes_nothing_and_keeps_the_version(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1, models=("another",))
    run()
    (record,) = run.steps()
    check_skipped(run, record)
    assert record["excluded"] == {"model not trained": 4, "rollout: nothing trainable": 4}
    assert record["excluded_tokens"] == {"model not trained": 8}


def test_R10_a_run_goes_on_after_a_step_without_signal(tmp_path):
    run = Run(tmp_path / "run", lambda episode: by_member(episode) if "step-0002" in episode.attempt.id else 0.0)
    run()
    assert [record.get("skipped", False) for record in run.steps()] == [True, False]
    assert [record["policy_version"] for record in run.steps()] == [0, 1]
    assert run.backend.weights == 1


def test_a_dynamic_filter_sees_what_the_estimator_sees(tmp_path):
    """All rollouts earn 0 in the end; one of the first group earned something by a call."""

    def by_call(episode):
        earned = episode.attempt.rollout_id == "step-0001-000-1"
        return Score(value=0.0, calls={episode.calls[0].id: float(earned)})

    run = Run(tmp_path / "run", by_call, steps=1, groups=2, dynamic_filter=True, advantage="return_to_go")
    run()
    (record,) = run.steps()
    assert record["groups_trained"] == 1  # the others had none, however many were tried
    assert record["excluded"]["group: no signal, replaced"] == 5
    assert {row.sample.group_id for row in run.backend.batches[0]} == {"step-0001-000"}


def test_a_step_whose_gradient_is_not_finite_is_recorded_and_the_run_goes_on(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=2)
    learn, move = run.backend.forward_backward, run.backend.optim_step
    broken = [True, False]
    run.backend.forward_backward = lambda rows, loss: replace(learn(rows, loss), loss=math.nan if broken[0] else 0.5)

    def optim_step(lr):
        if broken.pop(0):
            return OptimStats(grad_norm=math.inf, lr=lr, skipped=True)
        return move(lr)

    run.backend.optim_step = optim_step
    run()
    first, second = run.steps()
    assert first["update_skipped"]
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert second["loss"] == 0.5
    assert run.backend.weights == 1


def test_weights_do_not_move_while_their_checkpoint_is_written(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=3)
    save, move = run.backend.save, run.backend.optim_step
    writing, moved = threading.Event(), []

    def slowly(directory):
        writing.set()
        time.sleep(0.2)
        save(directory)
        writing.clear()

    def optim_step(lr):
        moved.append(writing.is_set())
        return move(lr)

    run.backend.save, run.backend.optim_step = slowly, optim_step
    run()
    assert moved == [False, False, False]


def test_after_a_restart_a_sampler_sees_no_part_of_a_group_that_is_still_open(tmp_path):
    options = {"schedule": "collocated", "max_staleness": 2}
    run = Run(tmp_path / "run", by_member, steps=2, **options)
    slow = {"step-0001-001-0.a1"}
    run.agents.turns = lambda attempt_id: 10**9 if attempt_id in slow else 1
    run()
    again = Run(
        tmp_path / "run",
        by_member,
        store=run.store,
        backend=run.backend,
        steps=3,
        schedule="collocated",
        max_staleness=2,
    )
    seen = []
    with again.folder:
        trainer = again.trainer()
        trainer._sampler.observe = lambda rollouts: seen.append([r.id for r in rollouts])
        trainer.run()
    assert {len(group) for group in seen} == {2}
    assert len({group[0] for group in seen}) == len(seen)
