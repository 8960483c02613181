"""A store in memory: the contract of `protocols.Store` without a disk."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from outrider.errors import RewardError, StoreError
from outrider.types import Attempt, Call, Reward, Rollout, RolloutState, Session


class MemoryStore:
    """Set `failure` to make every later append fail with it: at once if it is a `StoreBusy`, else in the future."""

    remote = False

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        self.fail_at_once = False
        self._lock = threading.RLock()
        self._calls: list[Call] = []
        self._rewards: list[Reward] = []
        self._sessions: dict[str, Session] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[str, Attempt] = {}
        self._values: dict[str, str] = {}

    @property
    def pending(self) -> int:
        return 0

    def append_call(self, call: Call) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if self.failure is not None:
                if self.fail_at_once:
                    raise self.failure
                future.set_exception(self.failure)
            elif any(known.id == call.id for known in self._calls):
                future.set_exception(StoreError(f"memory: call {call.id} exists"))
            else:
                self._calls.append(replace(call, seq=len(self._calls) + 1))
                future.set_result(len(self._calls))
        return future

    def calls(self, attempt_id: str, after: int = 0) -> list[Call]:
        with self._lock:
            return [call for call in self._calls if call.attempt_id == attempt_id and call.seq > after]

    def call(self, call_id: str) -> Call | None:
        with self._lock:
            return next((call for call in self._calls if call.id == call_id), None)

    def calls_after(self, seq: int, limit: int = 1000) -> list[Call]:
        with self._lock:
            return self._calls[max(seq, 0) :][:limit]

    def add_reward(self, reward: Reward) -> Future[int]:
        if not math.isfinite(reward.value):
            raise RewardError(f"reward {reward.value} is no finite number")
        future: Future[int] = Future()
        with self._lock:
            self._rewards.append(reward)
            future.set_result(len(self._rewards))
        return future

    def rewards(self, attempt_id: str) -> list[Reward]:
        with self._lock:
            return [reward for reward in self._rewards if reward.attempt_id == attempt_id]

    def open_session(self, session: Session) -> None:
        with self._lock:
            if session.key_hash in self._sessions:
                raise StoreError("memory: the session exists")
            self._sessions[session.key_hash] = session

    def session(self, key_hash: str) -> Session | None:
        with self._lock:
            return self._sessions.get(key_hash)

    def sessions(self, attempt_id: str) -> list[Session]:
        with self._lock:
            return [session for session in self._sessions.values() if session.attempt_id == attempt_id]

    def seal(self, attempt_id: str) -> None:
        with self._lock:
            for key_hash, session in self._sessions.items():
                if session.attempt_id == attempt_id:
                    self._sessions[key_hash] = replace(session, sealed=True)

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        with self._lock:
            before = len(self._rollouts)
            for rollout in rollouts:
                self._rollouts.setdefault(rollout.id, rollout)
            return len(self._rollouts) - before

    def rollout(self, rollout_id: str) -> Rollout | None:
        with self._lock:
            return self._rollouts.get(rollout_id)

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, state: RolloutState | None = None
    ) -> list[Rollout]:
        with self._lock:
            return [
                rollout
                for rollout in self._rollouts.values()
                if split in (None, rollout.split) and step in (None, rollout.step) and state in (None, rollout.state)
            ]

    def transition(self, rollout: Rollout, *, expect: tuple[RolloutState, int]) -> bool:
        with self._lock:
            known = self._rollouts.get(rollout.id)
            if known is None or (known.state, known.attempt) != expect:
                return False
            self._rollouts[rollout.id] = rollout
            return True

    def put_attempt(self, attempt: Attempt) -> None:
        with self._lock:
            self._attempts[attempt.id] = attempt

    def attempt(self, attempt_id: str) -> Attempt | None:
        with self._lock:
            return self._attempts.get(attempt_id)

    def attempts(self, rollout_id: str) -> list[Attempt]:
        with self._lock:
            found = [attempt for attempt in self._attempts.values() if attempt.rollout_id == rollout_id]
            return sorted(found, key=lambda attempt: attempt.number)

    def set_value(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value

    def value(self, key: str) -> str | None:
        with self._lock:
            return self._values.get(key)

    def values(self, prefix: str) -> dict[str, str]:
        with self._lock:
            return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def close(self) -> None:
        pass
