"""Rollouts from queued to their end, with an executor whose exits are written down beforehand."""

import threading
import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import Interrupted, RunError
from outrider.keys import hash_key
from outrider.outcome import Outage, classify
from outrider.protocols import Exit
from outrider.reconcile import Reconciler
from outrider.stores.sqlite import SqliteStore
from outrider.types import (
    UPSTREAM_STATUS,
    Attempt,
    Call,
    CallState,
    Failure,
    Fidelity,
    Reward,
    Rollout,
    RolloutState,
    Score,
    Task,
)

OK = Exit(attempt_id="", exit_code=0, signal=None)


def call(attempt_id, number=0, state=CallState.COMPLETE, status=200, request=None):
    return Call(
        id=f"{attempt_id}-{number}",
        attempt_id=attempt_id,
        dialect="openai_chat",
        model="policy",
        state=state,
        status=status,
        streamed=False,
        request=request or f"request {number}".encode(),
        response=b"{}",
        prompt_ids=np.array([1], np.int32),
        choices=(),
        usage=None,
        fidelity=Fidelity.EXACT,
        started_at=time.time(),
    )


class Script:
    """An executor that ends each attempt as `ends(attempt_id)` says, after recording what the harness did."""

    def __init__(self, store, ends, calls=1):
        self.store, self.ends, self.calls = store, ends, calls
        self.live, self.peak, self.launches, self.stopped = deque(), 0, [], []

    def start(self, launch):
        self.launches.append(launch)
        self.live.append(launch.attempt_id)
        self.peak = max(self.peak, len(self.live))

    def poll(self, timeout_s):
        if not self.live:
            return []
        attempt_id = self.live.popleft()
        exit_ = self.ends(attempt_id)
        for number in range(self.calls):
            self.store.append_call(call(attempt_id, number)).result()
        return [replace(exit_, attempt_id=attempt_id)]

    def stop(self, attempt_id):
        self.stopped.append(attempt_id)

    def close(self):
        pass


class Listener:
    def __init__(self):
        self.messages, self.ended = [], []

    def phase(self, name, total): ...
    def record(self, record): ...

    def advance(self, rollout=None):
        self.ended.append(rollout.id)

    def message(self, text):
        self.messages.append(text)


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite3", synchronous="NORMAL")
    yield store
    store.close()


@pytest.fixture
def make(store, tmp_path):
    def make(ends=lambda attempt_id: OK, reward=lambda episode: 1.0, **changes):
        settings = {
            "store": store,
            "executor": Script(store, ends),
            "reward": reward,
            "reward_name": "test",
            "env_for_key": lambda key: {"KEY": key},
            "workdir": tmp_path / "work",
            "observer": Listener(),
            "concurrency": 4,
            "max_attempts": 3,
            "reward_timeout_s": 30.0,
            "stop": threading.Event(),
        }
        return Reconciler(**settings | changes)

    return make


def rollouts(count=3):
    return [Rollout(id=f"r{i}", task=Task(id=f"t{i}", fields={}), group_id="g") for i in range(count)]


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


def test_what_was_given_up_runs_when_it_is_asked_for_again(make, store):
    """The trainer died before the checkpoint of the step that gave it up: that step is done again."""
    first = make()
    first.submit(rollouts(1))
    first.abandon(["r0"])
    assert store.rollout("r0").state is RolloutState.CANCELLED
    (got,) = make().run(rollouts(1))
    assert (got.state, got.reward, got.failure) == (RolloutState.SUCCEEDED, 1.0, Failure.NONE)


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
    store.append_call(call("r0.a1")).result()  # late data of the dead attempt stays with it
    got = make(reward=lambda episode: float(len(episode.calls))).run(asked)
    assert (got[0].attempt, got[0].reward) == (2, 1.0)
    assert [a.failure for a in store.attempts("r0")] == [Failure.ORPHANED, Failure.NONE]


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


def test_R09_to_wait_for_a_thread_that_scores_is_not_the_rewards_fault(make):
    """All end at once, each is scored well within its time, all of them one after the other are not."""
    reconciler = make(reward=lambda episode: time.sleep(0.25) or 1.0, reward_timeout_s=1.0, concurrency=24)
    got = reconciler.run(rollouts(24))
    assert {(r.failure, r.reward, r.attempt) for r in got} == {(Failure.NONE, 1.0, 1)}


def test_R09_rewards_that_hang_leave_threads_for_the_others(make):
    release = threading.Event()

    def reward(episode):
        hangs = int(episode.task.id[1:]) < 6  # more than there are threads
        return release.wait(60) if hangs else 1.0

    got = make(reward=reward, reward_timeout_s=0.2, max_attempts=1, concurrency=12).run(rollouts(12))
    release.set()
    assert [r.reward for r in got] == [None] * 6 + [1.0] * 6


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


@pytest.mark.parametrize(
    ("calls", "failure"),
    [
        ([(CallState.FAILED, 502, b"a")], Failure.ENGINE),  # R09 f: the agent swallowed it and exits 0
        ([(CallState.FAILED, 502, b"a"), (CallState.COMPLETE, 200, b"a")], Failure.NONE),  # its client tried again
        ([(CallState.FAILED, 502, b"a"), (CallState.COMPLETE, 200, b"b")], Failure.ENGINE),
        ([(CallState.FAILED, 400, b"a")], Failure.NONE),  # R11: a context overflow is the harness's business
        ([(CallState.FAILED, 200, b"a")], Failure.ENGINE),  # S09: a stream that broke off
        ([(CallState.FAILED, 200, b"a"), (CallState.COMPLETE, 200, b"a")], Failure.NONE),
        ([(CallState.CANCELLED, 499, b"a")], Failure.NONE),
        ([], Failure.NO_CALLS),
    ],
)
def test_classify_by_calls(calls, failure):
    records = [call("r.a1", i, state, status, request) for i, (state, status, request) in enumerate(calls)]
    assert classify(OK, records, 0.0, ())[0] is failure


def test_an_overflow_that_is_told_in_a_stream_is_the_harnesss_business():
    told = replace(call("r.a1", 0, CallState.FAILED, 200, b"a"), error=f"{UPSTREAM_STATUS}400")
    assert classify(OK, [told], 0.0, ())[0] is Failure.NONE
