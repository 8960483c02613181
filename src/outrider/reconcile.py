"""Brings rollouts from `queued` to an end: starts attempts, watches them, classifies how they ended, scores them.

State lives in the store, never here: after a crash the same rollouts are handed in again, those that ended are taken as
they are (re-adoption), those that were running are tried again under a new attempt. Late data of a dead attempt stays
in the store under that attempt's id and is never counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.errors import Interrupted, RewardError, RunError
from outrider.keys import hash_key, new_key
from outrider.outcome import InvalidReward, Outage, classify, scored
from outrider.pool import DaemonPool
from outrider.protocols import Executor, Exit, Launch, Observer, RewardFunction, Store
from outrider.types import (
    Attempt,
    Episode,
    Failure,
    Reward,
    Rollout,
    RolloutState,
    Score,
    Session,
)

REWARDS_AT_ONCE = 4
"""Threads that score."""
FAIL_FAST = 8
"""If this many attempts end and not one is scored, the set-up is wrong and waiting longer teaches nothing."""
GIVE_UP = 4
"""Later, as many times the concurrency: more than one outage costs, so something broke for good."""


@dataclass(slots=True)
class _Running:
    rollout: Rollout
    attempt: Attempt


@dataclass(slots=True)
class _Scoring:
    running: _Running
    episode: Episode
    began: float | None = None
    """When a thread took it up: that it had to wait for one is not the reward's fault."""


def _new_pool() -> DaemonPool[Score]:
    return DaemonPool(REWARDS_AT_ONCE, "reward")


@dataclass(slots=True)
class Reconciler:
    """Runs rollouts through an executor.

    `env_for_key` gives the environment by which a harness finds the gateway. `outages` tells when our services were
    down: an attempt that overlaps one says nothing about the policy. `stop` is set from outside to end the work.
    """

    store: Store
    executor: Executor
    reward: RewardFunction
    reward_name: str
    env_for_key: Callable[[str], dict[str, str]]
    workdir: Path
    observer: Observer
    concurrency: int
    max_attempts: int
    reward_timeout_s: float
    stop: threading.Event
    outages: Callable[[], Sequence[Outage]] = tuple
    check: Callable[[], None] = lambda: None
    """Raises when a service is gone for good."""
    available: Callable[[], bool] = lambda: True
    """False while a service is down: what is started then can only fail."""
    failures: Counter[str] = field(default_factory=Counter)
    """Ended attempts by `Failure`, since the last `take_failures`."""
    _queue: deque[Rollout] = field(default_factory=deque)
    _ended: dict[str, Rollout] = field(default_factory=dict)
    _running: dict[str, _Running] = field(default_factory=dict)
    _scoring: dict[Future[Score], _Scoring] = field(default_factory=dict)
    _pool: DaemonPool[Score] = field(default_factory=_new_pool)
    _any_scored: bool = False
    _unscored_in_a_row: int = 0

    def run(self, wanted: Sequence[Rollout]) -> list[Rollout]:
        """Return `wanted` in the same order, each of them ended. Raises `RunError` and `Interrupted`."""
        try:
            self.submit(wanted)
            while not all(rollout.id in self._ended for rollout in wanted):
                self.tick()
        except BaseException:
            self.cancel()
            raise
        return [self._ended.pop(rollout.id) for rollout in wanted]

    def submit(self, wanted: Sequence[Rollout]) -> None:
        """Queue rollouts behind those that wait. Ones that ended in an earlier life are taken as they are."""
        self.store.add_rollouts(wanted)
        for asked in wanted:
            rollout = self.store.rollout(asked.id) or asked
            if rollout.state is RolloutState.RUNNING:
                rollout = self._orphaned(rollout)
            elif rollout.state is RolloutState.CANCELLED:  # given up in a life that a crash has taken back
                rollout = self._queued_again(rollout)
            self._place(rollout)

    def tick(self, patience_s: float = 0.5) -> None:
        """Start what there is room for and wait up to `patience_s` for something to end.

        Raises `RunError`, `Interrupted`.
        """
        if self.stop.is_set():
            raise Interrupted("stopped on request")
        self.check()
        available = self.available()
        # An attempt that is being scored takes no place: a slow judge must not keep agents waiting.
        while available and self._queue and len(self._running) - len(self._scoring) < self.concurrency:
            self._start(self._queue.popleft())
        if not available and not self._running:
            self.stop.wait(0.1)
        for rollout in self._collect(patience_s):
            self._place(rollout)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is being scored: a `tick` would do nothing."""
        return not self._queue and not self._running

    def take(self) -> list[Rollout]:
        """Hand over the rollouts that ended, and forget them here."""
        ended = list(self._ended.values())
        self._ended.clear()
        return ended

    def abandon(self, rollout_ids: Sequence[str]) -> None:
        """Give up these rollouts for good, wherever they stand; nobody will ask for them again."""
        unwanted = set(rollout_ids)
        self._queue = deque(rollout for rollout in self._queue if rollout.id not in unwanted)
        for rollout_id in unwanted:
            self._ended.pop(rollout_id, None)
        mine = [running for running in self._running.values() if running.rollout.id in unwanted]
        for running in mine:
            self.executor.stop(running.attempt.id)
            self._close(running, "given up")
        self._scoring = {
            future: scoring for future, scoring in self._scoring.items() if scoring.running.rollout.id not in unwanted
        }
        for rollout_id in unwanted:
            rollout = self.store.rollout(rollout_id)
            if rollout is not None and not rollout.state.ended:
                given_up = replace(rollout, state=RolloutState.CANCELLED, failure=Failure.CANCELLED, reason="given up")
                self.store.transition(given_up, expect=(rollout.state, rollout.attempt))

    def hold_time(self, held: bool) -> None:
        """See `Executor.hold_time`; any thread may call it."""
        self.executor.hold_time(held)

    def cancel(self) -> None:
        """Stop every attempt and leave its rollout queued in the store, so that the same run can go on later."""
        self._pool.shutdown(cancel_futures=True)
        for attempt_id in self._running:
            self.executor.stop(attempt_id)
        for running in list(self._running.values()):
            self._close(running, "run stopped")
            queued = replace(running.rollout, state=RolloutState.QUEUED)
            self.store.transition(queued, expect=(RolloutState.RUNNING, running.rollout.attempt))
        self._scoring.clear()
        self._queue.clear()

    def _close(self, running: _Running, reason: str) -> None:
        """Write that an attempt was cancelled, and forget it: how it exits is of no interest."""
        self.store.seal(running.attempt.id)
        del self._running[running.attempt.id]
        attempt = replace(running.attempt, ended_at=time.time(), failure=Failure.CANCELLED, reason=reason)
        self.store.put_attempt(attempt)

    def _place(self, rollout: Rollout) -> None:
        if rollout.state.ended:
            self._ended[rollout.id] = rollout
            self.observer.advance(rollout)
        else:
            self._queue.append(rollout)

    def take_failures(self) -> dict[str, int]:
        """Counts of failed attempts since the last call."""
        taken = dict(self.failures)
        self.failures.clear()
        return taken

    def _start(self, rollout: Rollout) -> None:
        running = replace(rollout, state=RolloutState.RUNNING, attempt=rollout.attempt + 1)
        attempt = Attempt(id=running.attempt_id, rollout_id=rollout.id, number=running.attempt, started_at=time.time())
        key = new_key()
        if not self.store.transition(running, expect=(rollout.state, rollout.attempt)):
            raise RunError(f"rollout {rollout.id}: somebody else is running it; is the run folder in use twice?")
        self.store.put_attempt(attempt)
        self.store.open_session(
            Session(attempt_id=attempt.id, key_hash=hash_key(key), mode=rollout.mode, sampling=rollout.sampling)
        )
        workdir = self.workdir / attempt.id
        workdir.mkdir(parents=True, exist_ok=True)
        self._running[attempt.id] = _Running(running, attempt)
        self.executor.start(
            Launch(attempt_id=attempt.id, task=rollout.task, env=self.env_for_key(key), workdir=workdir)
        )

    def _collect(self, patience_s: float) -> list[Rollout]:
        """Wait a little for something to end; returns rollouts that ended or go back to the queue."""
        changed: list[Rollout] = []
        live = len(self._running) - len(self._scoring)
        for ended in self.executor.poll(min(0.02, patience_s) if self._scoring else patience_s) if live else []:
            running = self._running.get(ended.attempt_id)
            if running is not None:
                changed += self._on_exit(running, ended)
        if self._scoring:
            timeout = 0.0 if live else patience_s
            done, _ = wait(self._scoring, timeout=timeout, return_when=FIRST_COMPLETED)
            for future in list(self._scoring):
                if future in done:
                    changed.append(self._on_score(self._scoring.pop(future).running, future))
            changed += self._give_up_slow_rewards()
        return changed

    def _give_up_slow_rewards(self) -> list[Rollout]:
        now, limit = time.monotonic(), self.reward_timeout_s
        # One that is done by now is taken next time: we may have been slower to look than it was to score.
        slow = [f for f, one in self._scoring.items() if one.began and now - one.began > limit and not f.done()]
        if not slow:
            return []
        reason = f"reward {self.reward_name} took longer than {limit:g} s"
        changed = [self._finish(self._scoring.pop(future).running, Failure.REWARD_ERROR, reason) for future in slow]
        # A thread can't be killed; the process will end without it. Scores that wait for one of these would wait for
        # ever: they get new ones.
        self._pool.shutdown()
        self._pool = _new_pool()
        for future in [future for future in self._scoring if future.cancel()]:
            self._score(self._scoring.pop(future))
        return changed

    def _score(self, scoring: _Scoring) -> None:
        def work() -> Score:
            scoring.began = time.monotonic()
            return scored(self.reward, self.reward_name, scoring.episode)

        self._scoring[self._pool.submit(work)] = scoring

    def _on_exit(self, running: _Running, ended: Exit) -> list[Rollout]:
        self.store.seal(running.attempt.id)
        calls = self.store.calls(running.attempt.id)
        failure, reason = classify(ended, calls, running.attempt.started_at, self.outages())
        running.attempt = replace(
            running.attempt,
            ended_at=time.time(),
            exit_code=ended.exit_code,
            signal=ended.signal,
            timed_out=ended.timed_out,
            failure=failure,
            reason=reason,
            stdout_tail=ended.stdout_tail,
            stderr_tail=ended.stderr_tail,
        )
        if failure.infrastructure:
            return [self._finish(running, failure, reason)]
        episode = Episode(
            task=running.rollout.task,
            attempt=running.attempt,
            calls=tuple(calls),
            workdir=self.workdir / running.attempt.id,
        )
        self._score(_Scoring(running, episode))
        return []

    def _on_score(self, running: _Running, future: Future[Score]) -> Rollout:
        error = future.exception()
        if isinstance(error, RewardError):
            invalid = isinstance(error, InvalidReward)
            return self._finish(running, Failure.REWARD_INVALID if invalid else Failure.REWARD_ERROR, str(error))
        if error is not None:
            raise error
        score = future.result()
        final = Reward(
            attempt_id=running.attempt.id,
            value=score.value,
            reason=score.reason,
            parts=dict(score.parts),
            source=self.reward_name,
            created_at=time.time(),
        )
        of_calls = [
            replace(final, value=value, call_id=call_id, reason="", parts={}) for call_id, value in score.calls.items()
        ]
        for written in [self.store.add_reward(reward) for reward in (*of_calls, final)]:
            written.result()
        return self._finish(running, running.attempt.failure, score.reason, reward=score.value)

    def _finish(self, running: _Running, failure: Failure, reason: str, reward: float | None = None) -> Rollout:
        """Write how the attempt ended; the rollout ends, or goes back to the queue."""
        rollout = running.rollout
        del self._running[running.attempt.id]
        self.store.put_attempt(replace(running.attempt, failure=failure, reason=reason))
        if failure is not Failure.NONE:
            self.failures[failure.value] += 1
        if reward is not None:
            self._any_scored, self._unscored_in_a_row = True, 0
            state = RolloutState.SUCCEEDED
        else:
            self._unscored_in_a_row += 1
            again = failure is Failure.CANCELLED or (failure.retried and self._tries(rollout) < self.max_attempts)
            state = RolloutState.QUEUED if again else RolloutState.FAILED
        changed = replace(rollout, state=state, reward=reward, failure=failure, reason=reason)
        if not self.store.transition(changed, expect=(RolloutState.RUNNING, rollout.attempt)):
            raise RunError(f"rollout {rollout.id}: its state changed under us; is the run folder in use twice?")
        self._tell(changed, running.attempt)
        return changed

    def _tries(self, rollout: Rollout) -> int:
        """Attempts that count against the limit: not those that died with the trainer or were stopped on request."""
        free = (Failure.ORPHANED, Failure.CANCELLED)
        return sum(attempt.failure not in free for attempt in self.store.attempts(rollout.id))

    def _tell(self, rollout: Rollout, attempt: Attempt) -> None:
        if rollout.state is RolloutState.SUCCEEDED:
            return
        outcome = "trying again" if rollout.state is RolloutState.QUEUED else "given up"
        self.observer.message(f"{attempt.id}: {rollout.failure}: {rollout.reason} ({outcome})")
        limit = GIVE_UP * self.concurrency if self._any_scored else FAIL_FAST
        if self._unscored_in_a_row >= limit or rollout.failure is Failure.HARNESS_NOT_FOUND:
            tail = (attempt.stderr_tail or attempt.stdout_tail).strip()[-1500:]
            said = f" The harness said:\n{tail}" if tail else ""
            raise RunError(
                f"no rollout could be scored; {self._unscored_in_a_row} attempts failed in a row, the last one with "
                f"{rollout.failure}: {rollout.reason}.{said}"
            )

    def _orphaned(self, rollout: Rollout) -> Rollout:
        """Close an attempt that a dead trainer left running, and queue the rollout again."""
        for attempt in self.store.attempts(rollout.id):
            if attempt.number == rollout.attempt:
                self.store.seal(attempt.id)
                reason = "the trainer stopped while it ran"
                self.store.put_attempt(replace(attempt, ended_at=time.time(), failure=Failure.ORPHANED, reason=reason))
        self.failures[Failure.ORPHANED.value] += 1
        return self._queued_again(rollout)

    def _queued_again(self, rollout: Rollout) -> Rollout:
        queued = replace(rollout, state=RolloutState.QUEUED)
        if not self.store.transition(queued, expect=(rollout.state, rollout.attempt)):
            raise RunError(f"rollout {rollout.id}: its state changed under us; is the run folder in use twice?")
        return queued
