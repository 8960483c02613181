"""The training loop over scripted agents: what a step trains on, what it leaves out, which version follows."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fakes.scripted_run import LOST, OK, Run
from outrider.collect import LATE_REWARD
from outrider.errors import EngineError, RewardError, RunError
from outrider.samplers.difficulty import Difficulty
from outrider.train import group_name
from outrider.types import Failure, Reward, RolloutState, Score, Task


def by_member(episode):
    """1 for one member of each group, 0 for the other."""
    return float(episode.attempt.rollout_id.endswith("-1"))


# -- R08: fenced by attempt ------------------------------------------------------------------------------------------


def test_R08_late_calls_and_rewards_of_a_dead_attempt_are_stored_and_never_counted(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=2)
    slow = "step-0001-000-0.a1"

    def ends(attempt_id):
        if attempt_id == "step-0002-000-0.a1":  # in the next step the dead attempt of the first one posts its result
            run.agents.call(slow)
            run.store.add_reward(Reward(attempt_id=slow, value=100.0)).result()
        return LOST if attempt_id == slow else OK

    run.agents.ends = ends
    run()
    assert len(run.store.calls(slow)) == 2
    assert [reward.value for reward in run.store.rewards(slow)] == [100.0]
    for step, record in enumerate(run.steps()):
        attempts = Counter(row.sample.rollout_id for row in run.backend.batches[step])
        assert set(attempts.values()) == {1}, "one result for each rollout"
        assert len(attempts) == record["rollouts"] == 4
        assert record["reward_mean"] == 0.5
        assert slow not in run.trained(step)
    assert "step-0001-000-0.a2" in run.trained(0)
    assert run.steps()[0]["failures"] == {Failure.EXECUTOR.value: 1}
    assert all(LATE_REWARD not in record["excluded"] for record in run.steps())  # it is no late one of a live attempt


# -- R12: versions ---------------------------------------------------------------------------------------------------


def test_R12_a_version_is_a_publish_that_succeeded(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=2)
    run.engine.failing = 2
    run()
    assert run.engine.loads == 4  # twice in vain, then one for each step
    assert [record["policy_version"] for record in run.steps()] == [1, 2]
    assert (run.engine.served, run.gateway.version) == (2, 2)
    assert sum("publish of version 1 failed" in text for text in run.listener.messages) == 2


def test_R12_a_publish_that_never_succeeds_ends_the_run_under_the_old_version(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1)
    run.engine.failing = 99
    with pytest.raises(RunError, match="cannot publish version 1: bucket 2 of 2"):
        run()
    assert (run.progress.policy_version, run.gateway.version) == (0, 0)
    assert run.steps() == []


def test_R12_tokens_keep_the_version_that_sampled_them_and_a_mixed_call_its_older_one(tmp_path):
    """Its older one where nobody knows when the weights were swapped; each token its own where it is known."""
    run = Run(tmp_path / "run", by_member, steps=1, groups=1)
    call = run.agents.call
    # Published between calls 1 and 2, and again in the middle of call 3 and of call 4.
    current = [0, 1, 2, 3]
    changes = [{}, {}, {"started_under": 1}, {"started_under": 2, "versions": ((2, 1), (3, 1))}]

    def turn(attempt_id):
        turn = len(run.store.calls(attempt_id))
        run.gateway.version = current[turn]
        return call(attempt_id, **changes[turn])

    run.agents.call = turn
    run.agents.turns = lambda attempt_id: 4
    run()
    for row in run.backend.batches[0]:
        sample = row.sample
        assert sample.versions[sample.loss_mask].tolist() == [0, 0, 1, 1, 1, 1, 2, 3]
        assert set(sample.versions[~sample.loss_mask].tolist()) == {-1}
        calls = run.store.calls(sample.attempt_id)
        assert [(c.version_start, c.version_end) for c in calls] == [(0, 0), (1, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("schedule", ["collocated", "disaggregated"])
@pytest.mark.parametrize("known", [True, False])
def test_R12_a_call_is_as_old_as_its_oldest_token_and_not_as_its_request(tmp_path, schedule, known):
    """It was forwarded under version 0 and sampled three publishes later, from one version into the next."""
    run = Run(tmp_path / "run", by_member, steps=8, schedule=schedule, max_staleness=2, groups=1)
    slow = {"step-0001-000-0.a1", "step-0001-000-1.a1"}
    run.agents.turns = lambda attempt_id: 10**9 if attempt_id in slow and not run.store.calls(attempt_id) else 1
    call = run.agents.call

    def streams(attempt_id):  # nothing of it is recorded before it ends
        version = run.gateway.version
        if attempt_id not in slow:
            call(attempt_id)
        elif version >= 3:
            versions = ((version - 1, 1), (version, 1))
            call(attempt_id, started_under=0, versions=versions if known else ())

    run.agents.call = streams
    run()
    dropped = sum((Counter(record["excluded"]) for record in run.steps()), Counter())
    trained = {
        row.sample.attempt_id: row.sample.versions[row.sample.loss_mask].tolist()
        for batch in run.backend.batches
        for row in batch
        if row.sample.attempt_id in slow
    }
    if known:
        assert dropped["group: over 2 policy versions old"] == 0
        assert trained.keys() == slow
        assert all(newer == older + 1 for older, newer in trained.values())
    else:
        assert dropped["group: over 2 policy versions old"] == 1
        assert trained == {}


@pytest.mark.parametrize("schedule", ["collocated", "disaggregated"])
def test_R12_a_call_that_streams_through_two_publishes_is_too_old_when_it_ends(tmp_path, schedule):
    run = Run(tmp_path / "run", by_member, steps=4, schedule=schedule, max_staleness=1, groups=1)
    slow = {"step-0001-000-0.a1", "step-0001-000-1.a1"}
    run.agents.turns = lambda attempt_id: 10**9 if attempt_id in slow and not run.store.calls(attempt_id) else 1
    call = run.agents.call

    def streams(attempt_id):  # nothing of it is recorded before it ends
        if attempt_id not in slow:
            call(attempt_id)
        elif run.gateway.version >= 2:
            call(attempt_id, started_under=0)

    run.agents.call = streams
    run()
    # Beside the trainer it is chance whether the group is found too old as it ends or between its first call and then.
    assert any(run.store.calls(attempt_id) for attempt_id in slow)
    if schedule == "collocated":
        assert run.store.rollout("step-0001-000-0").state is RolloutState.SUCCEEDED
    dropped = sum((Counter(record["excluded"]) for record in run.steps()), Counter())
    assert dropped["group: over 1 policy versions old"] == 1
    trained = {name for step in range(len(run.backend.batches)) for name in run.trained(step)}
    assert not [name for name in trained if name.startswith("step-0001-000-")]


@pytest.mark.parametrize("schedule", ["collocated", "disaggregated"])
def test_R12_staleness_is_judged_by_the_oldest_token_and_a_group_goes_whole(tmp_path, schedule):
    run = Run(tmp_path / "run", by_member, steps=4, schedule=schedule, max_staleness=1, groups=1)
    # One member of the first group makes a call under version 0 and gets its next answer only under version 2.
    slow = "step-0001-000-0.a1"
    run.agents.turns = lambda attempt_id: 10**9 if attempt_id == slow and run.gateway.version < 2 else 1
    call = run.agents.call
    run.agents.call = lambda attempt_id: (
        call(attempt_id) if attempt_id != slow or run.gateway.version >= 2 or not run.store.calls(slow) else None
    )
    run()
    dropped = Counter()
    for record in run.steps():
        dropped.update({k: v for k, v in record["excluded"].items() if k.startswith("group: over")})
    assert dropped == {"group: over 1 policy versions old": 1}
    trained = {name for step in range(len(run.backend.batches)) for name in run.trained(step)}
    assert not [name for name in trained if name.startswith("step-0001-000-")], "its fresh sibling goes with it"
    assert all(record["rollouts"] == 2 for record in run.steps())
    before = 0
    for record in run.steps():
        assert before - record["oldest_version"] <= 1
        before = record["policy_version"]


def test_R12_a_synchronous_step_trains_on_its_own_policys_tokens(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=3)
    run()
    for step, rows in enumerate(run.backend.batches):
        assert {int(v) for row in rows for v in row.sample.versions[row.sample.loss_mask]} == {step}


def test_extra_groups_that_a_synchronous_step_did_not_need_are_too_old_for_the_next(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=3, dynamic_filter=True, extra_groups=1)
    run()
    for step, rows in enumerate(run.backend.batches):
        assert {int(v) for row in rows for v in row.sample.versions[row.sample.loss_mask]} == {step}
    dropped = [record["excluded"].get("group: over 0 policy versions old", 0) for record in run.steps()]
    assert dropped == [0, 1, 1]


# -- rewards: late, and of single calls ------------------------------------------------------------------------------


def test_a_reward_that_comes_before_its_step_is_taken_counts(tmp_path):
    run = Run(tmp_path / "run", lambda episode: 0.0, steps=1)
    transition = run.store.transition

    def and_a_user_says_so(rollout, *, expect):
        done = transition(rollout, expect=expect)
        if rollout.state is RolloutState.SUCCEEDED and rollout.id.endswith("-1"):
            run.store.add_reward(Reward(attempt_id=f"{rollout.id}.a1", value=1.0, source="user")).result()
        return done

    run.store.transition = and_a_user_says_so
    run()
    (record,) = run.steps()
    assert (record["reward_mean"], record["groups_trained"]) == (0.5, 2)


def test_a_reward_that_comes_while_its_step_waits_for_another_group_counts(tmp_path):
    run = Run(tmp_path / "run", lambda episode: 0.0, steps=1)
    run.agents.turns = lambda attempt_id: 5 if "-001-" in attempt_id else 1

    def ends(attempt_id):
        if attempt_id == "step-0001-001-0.a1":  # the other group has been handed out by then
            run.store.add_reward(Reward(attempt_id="step-0001-000-0.a1", value=1.0)).result()
        return OK

    run.agents.ends = ends
    run()
    (record,) = run.steps()
    assert (record["reward_mean"], record["groups_trained"]) == (0.25, 1)


def test_a_reward_that_comes_after_its_step_was_taken_is_kept_and_counted_as_late(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=3)

    def ends(attempt_id):
        if attempt_id == "step-0002-000-0.a1":
            run.store.add_reward(Reward(attempt_id="step-0001-000-0.a1", value=9.0)).result()
            run.store.add_reward(Reward(attempt_id="step-0001-000-0.a1", value=9.0, name="style")).result()
        return OK

    run.agents.ends = ends
    run()
    assert [record["excluded"].get(LATE_REWARD, 0) for record in run.steps()] == [0, 1, 0]
    assert [record["reward_mean"] for record in run.steps()] == [0.5, 0.5, 0.5]
    assert run.store.rewards("step-0001-000-0.a1")[-2].value == 9.0


def test_somebody_elses_score_counts_where_ours_failed(tmp_path):
    def broken(episode):
        if episode.attempt.rollout_id == "step-0001-000-1":
            run.store.add_reward(Reward(attempt_id=episode.attempt.id, value=1.0, source="grader")).result()
            raise RewardError("the verifier is down")
        return 0.0

    run = Run(tmp_path / "run", broken, steps=1)
    run()
    (record,) = run.steps()
    assert record["groups_trained"] == 1
    assert "step-0001-000-1.a3" in run.trained(0)  # after all attempts


def test_rewards_of_single_calls_reach_the_estimator(tmp_path):
    def step_by_step(episode):
        good = episode.attempt.rollout_id.endswith("-1")
        return Score(value=0.0, calls={call.id: float(good and i == 1) for i, call in enumerate(episode.calls)})

    run = Run(tmp_path / "run", step_by_step, steps=1, groups=1, advantage="return_to_go", gamma=0.5)
    run.agents.turns = lambda attempt_id: 3
    run()
    of = {row.sample.rollout_id[-1]: row for row in run.backend.batches[0]}
    good, bad = (of[m].advantages[of[m].sample.loss_mask] for m in ("1", "0"))
    assert good[0] > bad[0]  # its first call leads to the reward of the second
    assert good[2] > good[0]  # which is nearer to it
    assert not np.array_equal(good, bad)


# -- evaluation and the best weights ---------------------------------------------------------------------------------

HELD_OUT = [Task(id=f"h{i}", fields={}) for i in range(4)]


def success_by_version(run_of, rates):
    def reward(episode):
        run = run_of()
        if episode.attempt.rollout_id.startswith("step-") and "greedy" not in episode.attempt.rollout_id:
            return by_member(episode)
        return float(int(episode.task.id[1:]) < rates[run.gateway.version])

    return reward


def test_the_best_weights_are_kept_and_survive_pruning_and_a_restart(tmp_path):
    run = Run(
        tmp_path / "run",
        success_by_version(lambda: run, [1, 2, 4, 2, 3]),
        steps=4,
        eval_every=1,
        keep_checkpoints=1,
    )
    run(HELD_OUT)
    best = run.folder.best()
    assert (best["step"], best["policy_version"], best["name"]) == (2, 2, "step-2")
    assert (run.folder.best_weights / "weights").read_text() == "2"
    assert not run.folder.weights_dir(2).exists(), "pruned, but for the copy"
    evaluations = [r for r in run.folder.records() if r["kind"] == "eval"]
    assert [(r["name"], r.get("best", False)) for r in evaluations] == [
        ("before", False),
        ("step-1", True),
        ("step-2", True),
        ("step-3", False),
        ("after", False),
    ]

    again = Run(
        tmp_path / "run",
        success_by_version(lambda: again, [1, 1, 1, 1, 1, 3, 4]),
        store=run.store,
        steps=6,
        eval_every=1,
        keep_checkpoints=1,
    )
    again(HELD_OUT)
    assert again.folder.best()["policy_version"] == 2, "as good is not better"


def test_an_evaluation_goes_on_beside_the_next_step_and_its_weights_stay_until_it_has_ended(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=3, eval_every=1, schedule="disaggregated")
    # The evaluation after step k cannot end before the gradient of step k + 1 is there.
    run.agents.turns = lambda attempt_id: (
        1 if not attempt_id.startswith("step-1-0001-greedy") or len(run.backend.batches) > 1 else 10**9
    )
    run(HELD_OUT)
    order = [(r["kind"], r["step"]) for r in run.folder.records()]
    assert order == [("eval", 0), ("step", 1), ("eval", 1), ("step", 2), ("eval", 2), ("step", 3), ("eval", 3)]
    for record in run.folder.records():
        if record["kind"] == "eval":
            measured = run.store.rollouts(split=f"{record['name']}/greedy")
            assert len(measured) == len(HELD_OUT)
            versions = {
                v for r in measured for c in run.store.calls(f"{r.id}.a1") for v in (c.version_start, c.version_end)
            }
            assert versions == {record["policy_version"]}, "weights changed while they were measured"


@pytest.mark.parametrize("schedule", ["sync", "disaggregated"])
def test_an_evaluation_that_a_crash_has_interrupted_is_made_up_for(tmp_path, schedule):
    run = Run(tmp_path / "run", by_member, steps=4, eval_every=2, schedule=schedule)
    append = run.folder.append

    def dies(record):
        if record["kind"] == "eval" and record["name"] == "step-2":
            raise RunError("the machine went down")
        append(record)

    run.folder.append = dies
    with pytest.raises(RunError, match="went down"):
        run(HELD_OUT)
    assert run.folder.latest().step == 2
    again = Run(tmp_path / "run", by_member, store=run.store, steps=4, eval_every=2, schedule=schedule)
    again(HELD_OUT)
    order = [r["name"] if r["kind"] == "eval" else r["step"] for r in again.folder.records()]
    assert order == ["before", 1, 2, "step-2", 3, 4, "after"]
    assert (again.listener.earlier, again.listener.new) == ([1, 2, "before"], ["step-2", 3, 4, "after"])
    assert all(r.attempt == 1 for r in again.store.rollouts(split="step-2/greedy")), "what had ended is not run again"


def test_without_held_out_tasks_nothing_is_called_best(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1)
    run()
    assert run.folder.best() is None


# -- going on --------------------------------------------------------------------------------------------------------


def test_carried_over_groups_survive_a_restart_with_the_rollouts_that_had_ended(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=2, schedule="collocated", max_staleness=2)
    slow = {"step-0001-001-0.a1"}  # of the first step's second group: it is still under way when the run ends
    run.agents.turns = lambda attempt_id: 10**9 if attempt_id in slow else 1
    run()
    assert all(record["rollouts"] == 4 for record in run.steps())
    carried = run.folder.latest().position["open"]
    assert 1 in carried
    sibling = run.store.rollout("step-0001-001-1")
    assert (sibling.state, sibling.attempt) == (RolloutState.SUCCEEDED, 1)

    again = Run(tmp_path / "run", by_member, store=run.store, steps=4, schedule="collocated", max_staleness=9)
    again()
    assert len(again.steps()) == 4
    trained = [set(again.trained(step)) for step in range(len(again.backend.batches))]
    everything = [name for step in trained for name in step]
    assert len(everything) == len(set(everything)), "no rollout is trained twice"
    assert {"step-0001-001-0.a2", "step-0001-001-1.a1"} <= set(everything), "the group is whole; nothing is run twice"


@pytest.mark.parametrize("schedule", ["sync", "collocated", "disaggregated"])
def test_a_run_that_has_taken_all_its_steps_starts_no_agent(tmp_path, schedule):
    run = Run(tmp_path / "run", by_member, steps=2, schedule=schedule)
    run(HELD_OUT)
    again = Run(tmp_path / "run", by_member, store=run.store, steps=2, schedule=schedule)
    started = []
    again.agents.start = started.append
    again(HELD_OUT)
    assert started == []


def test_a_sampler_sees_whole_groups_again_after_a_restart(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=2)
    run()
    again = Run(tmp_path / "run", by_member, store=run.store, steps=2)
    seen = []
    with again.folder:
        trainer = again.trainer()
        trainer._sampler.observe = lambda rollouts: seen.append([r.id for r in rollouts])
        trainer.run()
    assert [len(group) for group in seen] == [2, 2, 2, 2]
    assert seen[0] == ["step-0001-000-0", "step-0001-000-1"]


@pytest.mark.parametrize("schedule", ["sync", "collocated"])
@pytest.mark.parametrize("dynamic_filter", [False, True])
def test_a_curriculum_goes_on_where_it_was(tmp_path, schedule, dynamic_filter):
    """Groups end in another order than they began; some have no signal, some are given up when they are too old."""

    def chance(name):
        return zlib.crc32(name.encode())

    options = {"schedule": schedule, "dynamic_filter": dynamic_filter, "steps": 12, "groups": 3, "max_staleness": 1}

    def life(store=None, backend=None):
        run = Run(
            tmp_path / "run",
            lambda episode: float(chance(episode.attempt.rollout_id) % 3 == 0 or episode.task.id == "t0"),
            store=store,
            backend=backend,
            tasks=6,
            group_size=4,
            **options,
        )
        run.agents.turns = lambda name: 1 + chance(name) % 9 if chance(name) % 7 else 60
        run.sampler = Difficulty
        return run

    run = life()
    with run.folder:
        before = run.trainer()
        before.run()
    again = life(run.store, run.backend)
    with again.folder:
        after = again.trainer()
        after._restore()
    assert before._sampler._weight.max() > 1.5
    np.testing.assert_array_equal(after._sampler._solved, before._sampler._solved)
    np.testing.assert_array_equal(after._sampler._weight, before._sampler._weight)


def test_collocated_pauses_the_gateway_while_it_trains(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1, schedule="collocated")
    forward_backward = run.backend.forward_backward
    paused = []
    run.backend.forward_backward = lambda rows, loss: (
        paused.append((run.gateway.paused, run.agents.held)) or forward_backward(rows, loss)
    )
    run()
    assert paused == [(True, True)]
    assert not run.gateway.paused


@pytest.mark.parametrize("schedule", ["sync", "collocated", "disaggregated"])
@pytest.mark.parametrize("signal", [True, False])
def test_no_agents_time_runs_while_it_is_not_answered(tmp_path, schedule, signal):
    run = Run(tmp_path / "run", by_member if signal else lambda episode: 0.0, steps=2, schedule=schedule)
    seen = []
    load, append = run.engine.load_weights, run.folder.append
    run.engine.load_weights = lambda path, version: seen.append(run.agents.held) or load(path, version)
    run.folder.append = lambda record: seen.append(not run.agents.held) or append(record)
    run()
    assert all(seen)
    assert len(seen) == (6 if signal else 4), "held at each publish, and at no record of a step or an evaluation"
    assert not run.agents.held


@pytest.mark.parametrize("schedule", ["sync", "collocated", "disaggregated"])
def test_a_gateway_that_dies_while_the_trainer_works_is_waited_for(tmp_path, schedule):
    run = Run(tmp_path / "run", by_member, steps=2, schedule=schedule)
    down = []

    def dies_after(work):
        def working(*arguments):
            done = work(*arguments)
            down.append(True)
            return done

        return working

    def asked(what):
        def asking(value=0, timeout_s=0):
            if down:
                raise EngineError("the gateway cannot be reached")
            return what(value or timeout_s)

        return asking

    run.gateway.pause, run.gateway.resume = asked(run.gateway.pause), asked(run.gateway.resume)
    run.engine.load_weights = dies_after(run.engine.load_weights)
    run.backend.forward_backward = dies_after(run.backend.forward_backward)
    run.services_up = down.clear
    run()
    assert [record["policy_version"] for record in run.steps()] == [1, 2]
    assert (run.engine.loads, run.gateway.version) == (2, 2)


def test_exclusions_of_a_step_are_in_its_record(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1, groups=1, max_tokens=6, too_long="keep_start")
    run.agents.turns = lambda attempt_id: 2
    run()
    (record,) = run.steps()
    assert record["excluded"] == {"too_long": 2}
    assert record["excluded_tokens"] == {"too_long": 4}
    assert (record["tokens"], record["breaks"]) == (4, 0)


@pytest.mark.parametrize("schedule", ["sync", "collocated"])
@pytest.mark.parametrize("options", [{}, {"dynamic_filter": True}, {"max_tokens": 9, "too_long": "cut"}])
def test_every_token_of_a_group_that_is_done_with_is_trained_or_counted(tmp_path, schedule, options):
    """Groups end early and late, with and without signal; some rollouts can't be scored, some groups are too old."""

    def chance(name):
        return zlib.crc32(name.encode())

    def reward(episode):
        if chance(episode.attempt.rollout_id) % 7 == 0:
            raise RewardError("cannot tell")
        return float(chance(episode.attempt.rollout_id) % 3 == 0)

    run = Run(tmp_path / "run", reward, steps=8, groups=3, group_size=4, schedule=schedule, max_staleness=1, **options)
    slow = {"step-0001-001-0.a1"} if schedule == "collocated" else set()  # until its group is too old, however fast

    def turns(name):
        if name in slow and run.gateway.version < 2:
            return 10**9
        return 1 + chance(name) % 9 if chance(name) % 7 else 40

    run.agents.turns = turns
    run()
    position = run.folder.latest().position
    done = {group_name(run.config, index) for index in set(range(position["next"])) - set(position["open"])}
    sampled = sum(
        len(choice.token_ids)
        for rollout in run.store.rollouts()
        if rollout.group_id in done
        for call in run.store.calls(rollout.attempt_id)
        for choice in call.choices
    )
    excluded = sum((Counter(record["excluded_tokens"]) for record in run.steps()), Counter())
    assert sampled == sum(record["tokens"] for record in run.steps()) + excluded.total()
    assert excluded["rollout failed: reward_error"]
    assert excluded["group: no signal, replaced" if "dynamic_filter" in options else "rollout: group without signal"]
    assert bool(excluded["group: over 1 policy versions old"]) == (schedule == "collocated")


def test_a_failed_rollout_leaves_its_group_and_is_counted(tmp_path):
    run = Run(tmp_path / "run", by_member, steps=1, group_size=3)
    run.agents.ends = lambda attempt_id: LOST if "-000-2" in attempt_id else OK
    run()
    (record,) = run.steps()
    assert record["excluded"] == {"rollout failed: executor": 1}
    assert replace(run.store.rollout("step-0001-000-2")).reward is None
