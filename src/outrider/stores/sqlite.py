"""The embedded store: one SQLite file in WAL mode, opened by gateway, trainer and inspection at the same time."""

from __future__ import annotations

import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from outrider.errors import RewardError, StoreError
from outrider.stores import packing
from outrider.stores.group_writer import GroupWriter
from outrider.stores.packing import Bodies, Row
from outrider.stores.sqlite_prune import SqlitePruner
from outrider.stores.sqlite_schema import migrate
from outrider.types import Attempt, Call, Reward, Rollout, RolloutState, Session

T = TypeVar("T")

BUSY_TIMEOUT_S = 30.0
WAL_LIMIT_BYTES = 64 << 20


class SqliteStore:
    """Satisfies `protocols.Store`.

    Writes go through one thread per process, in groups, each in a ``BEGIN IMMEDIATE`` transaction (a deferred one
    fails at once when another process wrote meanwhile, whatever the busy timeout). Reads run on the caller's thread
    over their own connections and never wait for a writer. Raises `StoreError`, which names the file.

    With `synchronous` ``FULL`` a future resolves after an fsync; with ``NORMAL`` a power cut, but no crash of a
    process, may take back the last commits.
    """

    remote = False

    def __init__(
        self,
        path: str | Path,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        *,
        max_queued: int = 4096,
        max_queued_bytes: int = 256 << 20,
    ) -> None:
        self.path = Path(path)
        self._label = str(path)
        if synchronous not in ("FULL", "NORMAL"):
            raise StoreError(f"{self._label}: synchronous must be FULL or NORMAL, not {synchronous!r}.")
        self._synchronous = synchronous
        self._readers: deque[_Reader] = deque()
        self._closed = False
        self._bodies = Bodies()  # the writer thread's own
        self._connect_writer().close()  # so that a file that is no store is told here, not at the first write
        self._writer = GroupWriter(
            self._connect_writer, label=self._label, max_queued=max_queued, max_queued_bytes=max_queued_bytes
        )

    @property
    def pending(self) -> int:
        """Writes that are not durable yet."""
        return self._writer.pending

    def append_call(self, call: Call) -> Future[int]:
        return self._insert(
            "calls",
            packing.CALL_COLUMNS,
            lambda: packing.call_row(call, self._bodies),
            size=len(call.request) + len(call.response),
        )

    def calls(self, attempt_id: str) -> list[Call]:
        return self._calls("WHERE attempt_id = ? ORDER BY seq", (attempt_id,))

    def call(self, call_id: str) -> Call | None:
        found = self._calls("WHERE id = ?", (call_id,))
        return found[0] if found else None

    def calls_after(self, seq: int, limit: int = 1000) -> list[Call]:
        return self._calls("WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit))

    def add_reward(self, reward: Reward) -> Future[int]:
        if not math.isfinite(reward.value):
            raise RewardError(
                f"reward {reward.name!r} of attempt {reward.attempt_id} is {reward.value}, no finite number."
            )
        return self._insert("rewards", packing.REWARD_COLUMNS, lambda: packing.reward_row(reward))

    def rewards(self, attempt_id: str) -> list[Reward]:
        columns = ", ".join(packing.REWARD_COLUMNS)
        rows = self._query(f"SELECT {columns} FROM rewards WHERE attempt_id = ? ORDER BY seq", (attempt_id,))
        return [packing.reward_from(row) for row in rows]

    def open_session(self, session: Session) -> None:
        self._insert("sessions", packing.SESSION_COLUMNS, lambda: packing.session_row(session)).result()

    def session(self, key_hash: str) -> Session | None:
        rows = self._query(f"{_SELECT_SESSIONS} WHERE key_hash = ?", (key_hash,))
        return packing.session_from(rows[0]) if rows else None

    def sessions(self, attempt_id: str) -> list[Session]:
        rows = self._query(f"{_SELECT_SESSIONS} WHERE attempt_id = ?", (attempt_id,))
        return [packing.session_from(row) for row in rows]

    def seal(self, attempt_id: str) -> None:
        self._write("UPDATE sessions SET sealed = 1 WHERE attempt_id = ?", (attempt_id,))

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        rows = [packing.rollout_row(rollout) for rollout in rollouts]
        statement = _insert_into("rollouts", packing.ROLLOUT_COLUMNS) + " ON CONFLICT (id) DO NOTHING"
        return self._do(lambda connection: connection.executemany(statement, rows).rowcount) if rows else 0

    def rollout(self, rollout_id: str) -> Rollout | None:
        found = self._rollouts("WHERE id = ?", (rollout_id,))
        return found[0] if found else None

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, state: RolloutState | None = None
    ) -> list[Rollout]:
        wanted = {"split": split, "step": step, "state": state}
        given = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column} = ?" for column in given)
        return self._rollouts(f"WHERE {where} ORDER BY number" if given else "ORDER BY number", tuple(given.values()))

    def transition(self, rollout: Rollout, *, expect: tuple[RolloutState, int]) -> bool:
        assignments = ", ".join(f"{column} = ?" for column in packing.ROLLOUT_COLUMNS)
        statement = f"UPDATE rollouts SET {assignments} WHERE id = ? AND state = ? AND attempt = ?"
        return self._write(statement, (*packing.rollout_row(rollout), rollout.id, *expect)) == 1

    def put_attempt(self, attempt: Attempt) -> None:
        replaced = ", ".join(f"{column} = excluded.{column}" for column in packing.ATTEMPT_COLUMNS[1:])
        statement = _insert_into("attempts", packing.ATTEMPT_COLUMNS) + f" ON CONFLICT (id) DO UPDATE SET {replaced}"
        self._write(statement, packing.attempt_row(attempt))

    def attempt(self, attempt_id: str) -> Attempt | None:
        found = self._attempts("WHERE id = ?", attempt_id)
        return found[0] if found else None

    def attempts(self, rollout_id: str) -> list[Attempt]:
        return self._attempts("WHERE rollout_id = ? ORDER BY number", rollout_id)

    def set_value(self, key: str, value: str) -> None:
        self._write('INSERT INTO "values" VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value', (key, value))

    def value(self, key: str) -> str | None:
        rows = self._query('SELECT value FROM "values" WHERE key = ?', (key,))
        return str(rows[0][0]) if rows else None

    def values(self, prefix: str) -> dict[str, str]:
        return dict(self._query('SELECT key, value FROM "values" WHERE substr(key, 1, length(?1)) = ?1', (prefix,)))

    def pruner(self) -> SqlitePruner:
        """For `prune.prune`."""
        return SqlitePruner(self.path)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._close_readers()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _do(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        return self._writer.submit(operation).result()

    def _write(self, statement: str, values: Row) -> int:
        """Returns the number of rows changed."""
        return self._do(lambda connection: connection.execute(statement, values).rowcount)

    def _insert(self, table: str, columns: tuple[str, ...], row: Callable[[], Row], size: int = 0) -> Future[int]:
        """The future gives the row's number. `row` is called on the writer thread: callers don't wait for zstd."""
        statement = _insert_into(table, columns)

        def operation(connection: sqlite3.Connection) -> int:
            return connection.execute(statement, row()).lastrowid or 0

        return self._writer.submit(operation, size)

    def _connect_writer(self) -> sqlite3.Connection:
        connection = self._connect()
        try:
            # Acts on a new file only: pruning can give room back.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            _use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
            migrate(connection, self._label)
        except sqlite3.Error as error:
            connection.close()
            raise StoreError(f"{self._label}: cannot be used as a store: {error}.") from error
        except BaseException:
            connection.close()
            raise
        return connection

    # -- reading ---------------------------------------------------------------------------------------------------

    def _calls(self, where: str, values: Row) -> list[Call]:
        with self._reader() as reader:
            rows = reader.connection.execute(f"{_SELECT_CALLS} {where}", values)
            return [packing.call_from(row, reader.bodies) for row in rows]

    def _rollouts(self, where: str, values: Row) -> list[Rollout]:
        rows = self._query(f"SELECT {', '.join(packing.ROLLOUT_COLUMNS)} FROM rollouts {where}", values)
        return [packing.rollout_from(row) for row in rows]

    def _attempts(self, where: str, value: str) -> list[Attempt]:
        rows = self._query(f"SELECT {', '.join(packing.ATTEMPT_COLUMNS)} FROM attempts {where}", (value,))
        return [packing.attempt_from(row) for row in rows]

    def _query(self, statement: str, values: Row) -> list[Any]:
        with self._reader() as reader:
            return reader.connection.execute(statement, values).fetchall()

    @contextmanager
    def _reader(self) -> Iterator[_Reader]:
        """A connection nobody else uses meanwhile; as many exist as there were readers at the same time."""
        reader = self._take_reader()
        try:
            yield reader
        except sqlite3.Error as error:
            reader.connection.close()
            raise StoreError(f"{self._label}: cannot read: {error}.") from error
        except BaseException:
            reader.connection.close()
            raise
        self._readers.append(reader)
        if self._closed:  # closed while we read
            self._close_readers()

    def _take_reader(self) -> _Reader:
        if self._closed:
            raise StoreError(f"{self._label}: the store is closed.")
        try:
            return self._readers.pop()
        except IndexError:
            return _Reader(self._connect(), Bodies())

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().connection.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except sqlite3.Error as error:
            raise StoreError(f"{self._label}: cannot be opened: {error}.") from error


class _Reader:
    def __init__(self, connection: sqlite3.Connection, bodies: Bodies) -> None:
        self.connection = connection
        self.bodies = bodies


_SELECT_CALLS = f"SELECT seq, {', '.join(packing.CALL_COLUMNS)} FROM calls"
_SELECT_SESSIONS = f"SELECT {', '.join(packing.SESSION_COLUMNS)} FROM sessions"


def _insert_into(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL. The switch ignores the busy timeout when two processes open a new file at once, hence the loop."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
