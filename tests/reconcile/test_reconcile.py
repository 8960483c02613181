"""Rollouts from queued to their end, with an executor whose exits are written down beforehand."""

import threading
import time
from dataclasses import replace

import pytest

from fakes.scripted_executor import OK, made, rollouts
from outrider.errors import Interrupted, RunError
from outrider.keys import hash_key
from outrider.outcome import Outage
from outrider.types import Attempt, Failure, RolloutState, Score


def test_every_rollout_ends_with_its_reward_and_a_sealed_key(make, store):
    reconciler = make(reward=lambda episode: Score(value=0.5, reason="half", parts={"format": 0.5}))
    got = reconciler.run(rollouts(10))
    assert [(r.id, r.state, r.reward, r.reason) for r in got] == [
        (f"r{i}", RolloutState.SUCCEEDED, 0.5, "half") for i in range(10)
    ]
    assert reconciler.executor.peak <= 4
    assert [(r.value, r.parts) for r in store.rewards("r3.a1")] == [(0.5, {"format": 0.5})]
    for launch in reconciler.executor.launches:
        session = store.session(hash_key(launch.env["KEY"]))
        assert session is not None
        assert session.sealed


def test_what_was_given_up_runs_when_it_is_asked_for_again(make, store):
    """The trainer died before the checkpoint of the step that gave it up: that step is done again."""
    first = make()
    first.submit(rollouts(1))
    first.abandon(["r0"])
    assert store.rollout("r0").state is RolloutState.CANCELLED
    (got,) = make().run(rollouts(1))
    assert (got.state, got.reward, got.failure) == (RolloutState.SUCCEEDED, 1.0, Failure.NONE)


@pytest.mark.parametrize("stage", ["queued", "running", "scoring", "ended"])
def test_what_is_abandoned_ends_wherever_it_stands_and_the_rest_goes_on(make, store, stage):
    release = threading.Event()
    waits = stage == "scoring"
    reconciler = make(
        reward=lambda episode: float(waits and release.wait(60)), concurrency=1 if stage == "queued" else 4
    )
    wanted = rollouts(2)
    reconciler.submit(wanted)
    live = reconciler.executor.live
    if stage == "queued":
        reconciler.executor.poll = lambda timeout_s: []
        reconciler.tick()
    elif stage == "running":
        poll, reconciler.executor.poll = reconciler.executor.poll, lambda timeout_s: []
        reconciler.tick()
        reconciler.executor.poll = poll
    else:
        while live or not reconciler.executor.launches:
            reconciler.tick()
        while stage == "ended" and not reconciler.idle:
            reconciler.tick()
    unwanted = "r1"
    reconciler.abandon([unwanted])
    release.set()
    if stage == "queued":
        del reconciler.executor.poll
    ended = []
    while not ended or not reconciler.idle:
        reconciler.tick()
        ended += reconciler.take()
    assert [rollout.id for rollout in ended] == ["r0"]
    kept = store.rollout(unwanted)
    expected = (
        (RolloutState.SUCCEEDED, Failure.NONE) if stage == "ended" else (RolloutState.CANCELLED, Failure.CANCELLED)
    )
    assert (kept.state, kept.failure) == expected
    assert reconciler.executor.stopped == (["r1.a1"] if stage in ("running", "scoring") else [])
    for launch in reconciler.executor.launches:
        assert store.session(hash_key(launch.env["KEY"])).sealed


def test_running_again_takes_what_has_ended(make):
    make().run(rollouts(3))
    again = make(ends=lambda attempt_id: pytest.fail("must not run again"))
    assert [r.reward for r in again.run(rollouts(3))] == [1.0] * 3
    assert again.executor.launches == []


def test_rollouts_of_a_dead_trainer_get_a_new_attempt(make, store):
    asked = rollouts(1)
    store.add_rollouts(asked)
    store.transition(replace(asked[0], state=RolloutState.RUNNING, attempt=1), expect=(RolloutState.QUEUED, 0))
    store.put_attempt(Attempt(id="r0.a1", rollout_id="r0", number=1, started_at=time.time()))
    store.append_call(made("r0.a1")).result()  # late data of the dead attempt stays with it
    got = make(reward=lambda episode: float(len(episode.calls))).run(asked)
    assert (got[0].attempt, got[0].reward) == (2, 1.0)
    assert [a.failure for a in store.attempts("r0")] == [Failure.ORPHANED, Failure.NONE]


def test_R09_policy_failures_are_graded(make):
    ends = {
        "r0.a1": replace(OK, exit_code=1),
        "r1.a1": replace(OK, exit_code=None, signal=9, timed_out=True),  # R09 d: graded on partial state
        "r2.a1": OK,
    }
    got = make(ends=ends.__getitem__, reward=lambda episode: 0.75).run(rollouts(3))
    assert [r.failure for r in got] == [Failure.HARNESS_EXIT, Failure.HARNESS_TIMEOUT, Failure.NONE]
    assert [r.reward for r in got] == [0.75] * 3


def test_fail_fast_tells_what_the_harness_said(make):
    ends = lambda attempt_id: replace(OK, exit_code=1, stderr_tail="ModuleNotFoundError: No module named 'foo'")  # noqa: E731
    reconciler = make(ends=ends)
    reconciler.executor.calls = 0
    with pytest.raises(RunError, match="never called the model") as error:
        reconciler.run(rollouts(20))
    assert "No module named 'foo'" in str(error.value)
    assert len(reconciler.executor.launches) < 20


def test_one_success_is_enough_to_go_on(make):
    def reward(episode):
        if episode.task.id != "t0":
            raise ValueError("no")
        return 1.0

    got = make(reward=reward, max_attempts=1, concurrency=1).run(rollouts(4))
    assert [r.state for r in got] == [RolloutState.SUCCEEDED] + [RolloutState.FAILED] * 3
    with pytest.raises(RunError, match="4 attempts failed in a row"):  # but what broke for good is told
        make(reward=reward, max_attempts=1, concurrency=1).run([replace(r, id=f"again-{r.id}") for r in rollouts(9)])


def test_a_missing_harness_ends_the_run_at_once(make):
    reconciler = make(ends=lambda attempt_id: replace(OK, exit_code=None, not_found=True, reason="no such file: agent"))
    with pytest.raises(RunError, match="no such file: agent"):
        reconciler.run(rollouts(20))
    assert len(reconciler.executor.launches) <= 4


def test_stopping_puts_rollouts_back_and_the_next_run_takes_them(make, store):
    stop = threading.Event()

    def ends(attempt_id):
        if attempt_id == "r2.a1":
            stop.set()
        return OK

    first = make(ends=ends, stop=stop, concurrency=2)
    with pytest.raises(Interrupted):
        first.run(rollouts(6))
    states = {r.id: r.state for r in store.rollouts()}
    assert set(states.values()) == {RolloutState.SUCCEEDED, RolloutState.QUEUED}
    done = {r for r, state in states.items() if state is RolloutState.SUCCEEDED}
    second = make()
    assert [r.state for r in second.run(rollouts(6))] == [RolloutState.SUCCEEDED] * 6
    assert not done & {launch.attempt_id.split(".")[0] for launch in second.executor.launches}


def test_an_attempt_that_a_restart_fell_into_is_tried_again(make):
    began = time.time()
    outages = []

    def ends(attempt_id):
        if attempt_id == "r0.a1":
            outages.append(Outage(service=Failure.GATEWAY, began_at=began, ended_at=time.time()))
            return replace(OK, exit_code=1)
        return OK

    got = make(ends=ends, outages=lambda: outages, concurrency=1).run(rollouts(2))
    assert [(r.attempt, r.reward) for r in got] == [(2, 1.0), (1, 1.0)]


def test_nothing_is_started_while_a_service_is_down(make):
    asked = []

    def available():
        asked.append(None)
        return len(asked) > 3

    reconciler = make(available=available)
    assert [(r.attempt, r.reward) for r in reconciler.run(rollouts(2))] == [(1, 1.0)] * 2
    assert len(asked) > 3
