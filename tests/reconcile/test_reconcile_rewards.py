"""Rewards of attempts that have ended: late ones, slow ones, and those that cannot tell."""

import threading
from dataclasses import replace

import pytest

from fakes.clock import LeapingClock
from fakes.scripted_executor import OK, rollouts
from outrider import reconcile
from outrider.reconcile import REWARDS_AT_ONCE
from outrider.types import Failure, Reward, RolloutState, Score


def test_rewards_of_single_calls_are_kept_beside_that_of_the_attempt(make, store):
    def reward(episode):
        return Score(value=1.0, calls={call.id: 0.25 * place for place, call in enumerate(episode.calls)})

    reconciler = make(reward=reward)
    reconciler.executor.calls = 2
    (got,) = reconciler.run(rollouts(1))
    assert got.reward == 1.0
    assert [(r.call_id, r.name, r.value) for r in store.rewards("r0.a1")] == [
        ("r0.a1-0", "final", 0.0),
        ("r0.a1-1", "final", 0.25),
        ("", "final", 1.0),
    ]


def test_a_slow_judge_keeps_no_agent_waiting(make):
    release = threading.Event()
    reconciler = make(reward=lambda episode: float(release.wait(60)), concurrency=1)
    reconciler.submit(rollouts(3))
    while len(reconciler.executor.launches) < 3:
        reconciler.tick()
    assert reconciler.executor.peak == 1
    assert reconciler.take() == []
    release.set()
    while not reconciler.idle:
        reconciler.tick()
    assert [rollout.reward for rollout in reconciler.take()] == [1.0] * 3


def test_R08_a_late_reward_of_an_old_attempt_is_kept_and_not_counted(make, store):
    def ends(attempt_id):
        return replace(OK, exit_code=None, lost=True) if attempt_id.endswith("a1") else OK

    got = make(ends=ends, reward=lambda episode: 0.25).run(rollouts(1))
    store.add_reward(Reward(attempt_id="r0.a1", value=1.0)).result()
    assert (got[0].attempt, got[0].reward) == (2, 0.25)
    assert store.rollout("r0").reward == 0.25


@pytest.mark.parametrize(
    ("reward", "failure"),
    [
        (lambda episode: 1 / 0, Failure.REWARD_ERROR),  # R09 a
        (lambda episode: float("nan"), Failure.REWARD_INVALID),  # R09 e
        (lambda episode: float("inf"), Failure.REWARD_INVALID),
        (lambda episode: None, Failure.REWARD_INVALID),  # R09 b, R03: null never becomes 0
        (lambda episode: "1.0", Failure.REWARD_INVALID),
        (lambda episode: True, Failure.REWARD_INVALID),
        (lambda episode: Score(value=float("nan")), Failure.REWARD_INVALID),
        (lambda episode: Score(value=1.0, calls={"r0.a1-0": float("nan")}), Failure.REWARD_INVALID),
        (lambda episode: Score(value=1.0, calls={"of another attempt": 1.0}), Failure.REWARD_INVALID),
    ],
)
def test_R09_a_reward_that_cannot_tell_is_no_zero(make, store, reward, failure):
    reconciler = make(reward=reward)
    got = reconciler.run(rollouts(1))[0]
    assert (got.state, got.reward, got.failure) == (RolloutState.FAILED, None, failure)
    assert len(store.attempts("r0")) == 3
    assert reconciler.take_failures() == {failure.value: 3}
    assert store.rewards("r0.a1") == []


def test_R09_a_reward_that_hangs_is_told(make):
    release = threading.Event()
    reconciler = make(reward=lambda episode: release.wait(60), reward_timeout_s=0.2, max_attempts=1)
    got = reconciler.run(rollouts(1))[0]
    release.set()
    assert (got.failure, got.reward) == (Failure.REWARD_ERROR, None)
    assert "longer than 0.2 s" in got.reason


@pytest.fixture
def clock(monkeypatch):
    """What the reconciler goes by."""
    clock = LeapingClock()
    monkeypatch.setattr(reconcile, "time", clock)
    return clock


def test_R09_to_wait_for_a_thread_that_scores_is_not_the_rewards_fault(make, clock):
    """All end at once, each is scored within its time, all of them one after the other are not."""
    together, all_ended = threading.Barrier(REWARDS_AT_ONCE, action=lambda: clock.leap(2000)), threading.Event()

    def reward(episode):
        assert all_ended.wait(60)
        together.wait(60)
        return 1.0

    reconciler = make(reward=reward, reward_timeout_s=3600.0, concurrency=24)
    reconciler.submit(rollouts(6 * REWARDS_AT_ONCE))
    while reconciler.executor.live or not reconciler.executor.launches:
        reconciler.tick(0.01)
    all_ended.set()
    while not reconciler.idle:
        reconciler.tick(0.01)
    got = reconciler.take()
    assert len(got) == 6 * REWARDS_AT_ONCE
    assert {(r.failure, r.reward, r.attempt) for r in got} == {(Failure.NONE, 1.0, 1)}


def test_R09_rewards_that_hang_leave_threads_for_the_others(make, clock):
    release = threading.Event()

    def hangs(task):
        return int(task.id[1:]) < 6  # more than there are threads

    reconciler = make(
        reward=lambda episode: float(release.wait(60)) if hangs(episode.task) else 1.0,
        reward_timeout_s=3600.0,
        max_attempts=1,
        concurrency=12,
    )

    def stuck():
        """Nothing but what hangs is being scored, and no thread is left that could take up another one."""
        waiting = [scoring for future, scoring in reconciler._scoring.items() if not future.done()]
        begun = [scoring for scoring in waiting if scoring.began is not None]
        return len(begun) in (REWARDS_AT_ONCE, len(waiting)) and all(hangs(one.episode.task) for one in begun)

    got = {}
    reconciler.submit(rollouts(12))
    while not reconciler.idle:
        reconciler.tick(0.01)
        got |= {rollout.id: rollout.reward for rollout in reconciler.take()}
        if stuck():
            clock.leap(4000)
    release.set()
    assert got == {f"r{i}": None if i < 6 else 1.0 for i in range(12)}
