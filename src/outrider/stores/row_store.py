"""What the stores that keep rows have in common: each method as SQL that SQLite and PostgreSQL both understand.

A statement marks its parameters with ``?``; no other question mark is in one.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

from outrider.errors import RewardError
from outrider.stores import packing
from outrider.stores.packing import Bodies, Row
from outrider.stores.write_queue import Operation
from outrider.types import Attempt, Call, Reward, Rollout, RolloutState, Session

T = TypeVar("T")


def insert_into(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _select(table: str, columns: Sequence[str]) -> str:
    return f"SELECT {', '.join(columns)} FROM {table}"


SELECT_CALLS = _select("calls", ("seq", *packing.CALL_COLUMNS))
SELECT_REWARDS = _select("rewards", packing.REWARD_COLUMNS)
SELECT_SESSIONS = _select("sessions", packing.SESSION_COLUMNS)
SELECT_ROLLOUTS = _select("rollouts", packing.ROLLOUT_COLUMNS)
SELECT_ATTEMPTS = _select("attempts", packing.ATTEMPT_COLUMNS)
INSERT_ROLLOUTS = insert_into("rollouts", packing.ROLLOUT_COLUMNS) + " ON CONFLICT (id) DO NOTHING"
UPDATE_ROLLOUT = (
    f"UPDATE rollouts SET {', '.join(f'{column} = ?' for column in packing.ROLLOUT_COLUMNS)}"
    " WHERE id = ? AND state = ? AND attempt = ?"
)
PUT_ATTEMPT = (
    insert_into("attempts", packing.ATTEMPT_COLUMNS)
    + " ON CONFLICT (id) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in packing.ATTEMPT_COLUMNS[1:])
)
SELECT_VALUES = 'SELECT key, value FROM "values" WHERE substr(key, 1, CAST(? AS INTEGER)) = ?'
SET_VALUE = 'INSERT INTO "values" VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value'


class RowStore(ABC):
    """All of `protocols.Store` but `remote`, `pending` and `close`, over `submit` and `query`."""

    def __init__(self, *, insert_call: str, returning: str = "") -> None:
        """`insert_call` takes what `call_row` gives. `returning`, with ``{}`` for a column, ends an INSERT that gives
        this column back; empty for a store whose writer knows a new row's number without."""
        self._insert_call = insert_call
        self._insert_reward = insert_into("rewards", packing.REWARD_COLUMNS) + returning.format("seq")
        self._insert_session = (
            insert_into("sessions", packing.SESSION_COLUMNS) + " ON CONFLICT DO NOTHING" + returning.format("key_hash")
        )
        self._local = threading.local()

    @abstractmethod
    def submit(self, operation: Operation, size: int = 0) -> Future[int]:
        """Queue a write that holds about `size` bytes. Raises `StoreBusy` when the queue is full."""

    @abstractmethod
    def query(self, statement: str, values: Row = ()) -> list[Row]:
        """The rows of a SELECT. Raises `StoreError`."""

    def call_row(self, call: Call) -> Row:
        return packing.call_row(call, self._bodies)

    @property
    def _bodies(self) -> Bodies:
        """The calling thread's own."""
        try:
            found: Bodies = self._local.bodies
        except AttributeError:
            found = self._local.bodies = Bodies()
        return found

    # -- calls, rewards --------------------------------------------------------------------------------------------

    def append_call(self, call: Call) -> Future[int]:
        taken = f"there is a call {call.id} already."
        # The row is made on the writer's thread: callers don't wait for zstd.
        operation = Operation(self._insert_call, lambda: [self.call_row(call)], taken)
        return self.submit(operation, len(call.request) + len(call.response))

    def calls(self, attempt_id: str, after: int = 0) -> list[Call]:
        return self._calls("WHERE attempt_id = ? AND seq > ? ORDER BY seq", (attempt_id, after))

    def call(self, call_id: str) -> Call | None:
        return _first(self._calls("WHERE id = ?", (call_id,)))

    def calls_after(self, seq: int, limit: int = 1000) -> list[Call]:
        return self._calls("WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit))

    def add_reward(self, reward: Reward) -> Future[int]:
        if not math.isfinite(reward.value):
            raise RewardError(
                f"reward {reward.name!r} of attempt {reward.attempt_id} is {reward.value}, no finite number."
            )
        return self.submit(_one(self._insert_reward, packing.reward_row(reward), "the reward is there already."))

    def rewards(self, attempt_id: str) -> list[Reward]:
        rows = self.query(f"{SELECT_REWARDS} WHERE attempt_id = ? ORDER BY seq", (attempt_id,))
        return [packing.reward_from(row) for row in rows]

    def _calls(self, where: str, values: Row) -> list[Call]:
        bodies = self._bodies
        return [packing.call_from(row, bodies) for row in self.query(f"{SELECT_CALLS} {where}", values)]

    # -- sessions --------------------------------------------------------------------------------------------------

    def open_session(self, session: Session) -> None:
        taken = f"there is a session with this key already, for attempt {session.attempt_id} or another."
        self.submit(_one(self._insert_session, packing.session_row(session), taken)).result()

    def session(self, key_hash: str) -> Session | None:
        return _first(self._sessions("key_hash", key_hash))

    def sessions(self, attempt_id: str) -> list[Session]:
        return self._sessions("attempt_id", attempt_id)

    def seal(self, attempt_id: str) -> None:
        self.write("UPDATE sessions SET sealed = true WHERE attempt_id = ?", (attempt_id,))

    def _sessions(self, column: str, value: str) -> list[Session]:
        return [packing.session_from(row) for row in self.query(f"{SELECT_SESSIONS} WHERE {column} = ?", (value,))]

    # -- rollouts, attempts ----------------------------------------------------------------------------------------

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        rows = [packing.rollout_row(rollout) for rollout in rollouts]
        return self.submit(Operation(INSERT_ROLLOUTS, lambda: rows)).result() if rows else 0

    def rollout(self, rollout_id: str) -> Rollout | None:
        return _first(self._rollouts("WHERE id = ?", (rollout_id,)))

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, state: RolloutState | None = None
    ) -> list[Rollout]:
        wanted = {"split": split, "step": step, "state": state}
        given = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in given)
        return self._rollouts(f"WHERE {where} ORDER BY number" if given else "ORDER BY number", tuple(given.values()))

    def transition(self, rollout: Rollout, *, expect: tuple[RolloutState, int]) -> bool:
        return self.write(UPDATE_ROLLOUT, (*packing.rollout_row(rollout), rollout.id, *expect)) == 1

    def put_attempt(self, attempt: Attempt) -> None:
        self.write(PUT_ATTEMPT, packing.attempt_row(attempt))

    def attempt(self, attempt_id: str) -> Attempt | None:
        return _first(self._attempts("WHERE id = ?", attempt_id))

    def attempts(self, rollout_id: str) -> list[Attempt]:
        return self._attempts("WHERE rollout_id = ? ORDER BY number", rollout_id)

    def _rollouts(self, where: str, values: Row) -> list[Rollout]:
        return [packing.rollout_from(row) for row in self.query(f"{SELECT_ROLLOUTS} {where}", values)]

    def _attempts(self, where: str, value: str) -> list[Attempt]:
        return [packing.attempt_from(row) for row in self.query(f"{SELECT_ATTEMPTS} {where}", (value,))]

    # -- values ----------------------------------------------------------------------------------------------------

    def set_value(self, key: str, value: str) -> None:
        self.write(SET_VALUE, (key, value))

    def value(self, key: str) -> str | None:
        found = _first(self.query('SELECT value FROM "values" WHERE key = ?', (key,)))
        return None if found is None else str(found[0])

    def values(self, prefix: str) -> dict[str, str]:
        rows = self.query(SELECT_VALUES, (len(prefix), prefix))
        return {str(key): str(value) for key, value in rows}

    def write(self, statement: str, values: Row) -> int:
        """Returns the number of rows changed."""
        return self.submit(_one(statement, values)).result()


def _one(statement: str, row: Row, taken: str = "") -> Operation:
    return Operation(statement, lambda: [row], taken)


def _first(found: list[T]) -> T | None:
    return found[0] if found else None
