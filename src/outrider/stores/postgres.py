"""The store for several gateways: a PostgreSQL schema that all of them write at the same time."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

from outrider.errors import ConfigError, RewardError, SetupError, StoreError
from outrider.stores import packing
from outrider.stores.packing import Bodies, Row
from outrider.types import Attempt, Call, Reward, Rollout, RolloutState, Session

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.types.numeric import Int8Dumper
except ImportError as error:
    raise SetupError("The PostgreSQL store needs psycopg: pip install 'outrider[postgres]'.") from error

from outrider.stores.postgres_prune import PostgresPruner
from outrider.stores.postgres_schema import Connection, migrate
from outrider.stores.postgres_writer import Operation, PostgresWriter, is_lost

# What the user's URL does not say. A connection that is dead without a word is given up after about 20 s.
CONNECTION = {
    "application_name": "outrider",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
# A process that is frozen within a transaction holds the store's lock for so long, and others wait for it no longer
# than `lock_timeout`.
WRITER_OPTIONS = "-c idle_in_transaction_session_timeout=10s -c lock_timeout=30s"
FORGET_WRITERS = "DELETE FROM writers WHERE seen_at < now() - interval '7 days'"


class PostgresStore:
    """Satisfies `protocols.Store`. `url` is ``postgresql://user:password@host/database``; tables lie in `schema`.

    Writes go through one thread per process, in groups, each in one transaction under a lock of the whole store; so
    sequence numbers grow in commit order whatever number of processes write (see `postgres_schema.LOCK`). Reads run
    on the caller's thread, in one round trip each, over at most `max_readers` connections. A connection that was lost
    is made anew; while the server is away all calls raise `StoreError`, which names host and database, no password.

    With `synchronous` ``FULL`` a future resolves when the server has flushed the commit (and, where the server says so,
    its standbys have); with ``NORMAL`` a crash of the server may take back the last commits.
    """

    remote = True

    def __init__(
        self,
        url: str,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        *,
        schema: str = "outrider",
        max_queued: int = 4096,
        max_queued_bytes: int = 256 << 20,
        max_readers: int = 8,
        resolve_s: float = 30.0,
    ) -> None:
        if not re.fullmatch("[a-z_][a-z0-9_]{0,62}", schema):
            raise ConfigError(f"store: the schema {schema!r} must be of a-z, 0-9 and _, and begin with a letter or _.")
        if synchronous not in ("FULL", "NORMAL"):
            raise ConfigError(f"store: synchronous must be FULL or NORMAL, not {synchronous!r}.")
        self._conninfo = _conninfo(url, schema)
        self.schema = schema
        self.label = _label(self._conninfo)
        self._synchronous = synchronous
        self._readers: deque[_Reader] = deque()
        self._free_readers = threading.BoundedSemaphore(max_readers)
        self._closed = False
        self._bodies = Bodies()  # the writer thread's own
        self._connect_writer().close()  # so that a wrong password is told here, not at the first write
        self._writer = PostgresWriter(
            self._connect_writer,
            label=self.label,
            max_queued=max_queued,
            max_queued_bytes=max_queued_bytes,
            resolve_s=resolve_s,
        )

    @property
    def pending(self) -> int:
        """Writes that are not durable yet."""
        return self._writer.pending

    def append_call(self, call: Call) -> Future[int]:
        def rows() -> list[Row]:
            row = packing.call_row(call, self._bodies)
            return [(*to_database(row), row[0])]

        taken = f"there is a call {call.id} already."
        return self._writer.submit(Operation(_INSERT_CALL, rows, taken), len(call.request) + len(call.response))

    def calls(self, attempt_id: str) -> list[Call]:
        return self._calls("WHERE attempt_id = %s ORDER BY seq", (attempt_id,))

    def call(self, call_id: str) -> Call | None:
        found = self._calls("WHERE id = %s", (call_id,))
        return found[0] if found else None

    def calls_after(self, seq: int, limit: int = 1000) -> list[Call]:
        return self._calls("WHERE seq > %s ORDER BY seq LIMIT %s", (seq, limit))

    def add_reward(self, reward: Reward) -> Future[int]:
        if not math.isfinite(reward.value):
            raise RewardError(
                f"reward {reward.name!r} of attempt {reward.attempt_id} is {reward.value}, no finite number."
            )
        statement = _insert_into("rewards", packing.REWARD_COLUMNS) + " RETURNING seq"
        return self._writer.submit(_one(statement, lambda: packing.reward_row(reward), taken="the reward exists."))

    def rewards(self, attempt_id: str) -> list[Reward]:
        columns = ", ".join(packing.REWARD_COLUMNS)
        rows = self.query(f"SELECT {columns} FROM rewards WHERE attempt_id = %s ORDER BY seq", (attempt_id,))
        return [packing.reward_from(row) for row in rows]

    def open_session(self, session: Session) -> None:
        statement = _insert_into("sessions", packing.SESSION_COLUMNS) + " ON CONFLICT DO NOTHING RETURNING key_hash"
        taken = f"there is a session with this key already, for attempt {session.attempt_id} or another."
        self._writer.submit(_one(statement, lambda: packing.session_row(session), taken=taken)).result()

    def session(self, key_hash: str) -> Session | None:
        rows = self.query(f"{_SELECT_SESSIONS} WHERE key_hash = %s", (key_hash,))
        return packing.session_from(rows[0]) if rows else None

    def sessions(self, attempt_id: str) -> list[Session]:
        rows = self.query(f"{_SELECT_SESSIONS} WHERE attempt_id = %s", (attempt_id,))
        return [packing.session_from(row) for row in rows]

    def seal(self, attempt_id: str) -> None:
        self.write("UPDATE sessions SET sealed = true WHERE attempt_id = %s", (attempt_id,))

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        if not rollouts:
            return 0
        statement = _insert_into("rollouts", packing.ROLLOUT_COLUMNS) + " ON CONFLICT (id) DO NOTHING"
        rows = [to_database(packing.rollout_row(rollout)) for rollout in rollouts]
        return self._writer.submit(Operation(statement, lambda: list(rows))).result()

    def rollout(self, rollout_id: str) -> Rollout | None:
        found = self._rollouts("WHERE id = %s", (rollout_id,))
        return found[0] if found else None

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, state: RolloutState | None = None
    ) -> list[Rollout]:
        wanted = {"split": split, "step": step, "state": state}
        given = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column} = %s" for column in given)
        return self._rollouts(f"WHERE {where} ORDER BY number" if given else "ORDER BY number", tuple(given.values()))

    def transition(self, rollout: Rollout, *, expect: tuple[RolloutState, int]) -> bool:
        assignments = ", ".join(f"{column} = %s" for column in packing.ROLLOUT_COLUMNS)
        statement = f"UPDATE rollouts SET {assignments} WHERE id = %s AND state = %s AND attempt = %s"
        return self.write(statement, (*packing.rollout_row(rollout), rollout.id, *expect)) == 1

    def put_attempt(self, attempt: Attempt) -> None:
        replaced = ", ".join(f"{column} = excluded.{column}" for column in packing.ATTEMPT_COLUMNS[1:])
        statement = _insert_into("attempts", packing.ATTEMPT_COLUMNS) + f" ON CONFLICT (id) DO UPDATE SET {replaced}"
        self.write(statement, packing.attempt_row(attempt))

    def attempt(self, attempt_id: str) -> Attempt | None:
        found = self._attempts("WHERE id = %s", attempt_id)
        return found[0] if found else None

    def attempts(self, rollout_id: str) -> list[Attempt]:
        return self._attempts("WHERE rollout_id = %s ORDER BY number", rollout_id)

    def set_value(self, key: str, value: str) -> None:
        statement = 'INSERT INTO "values" VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value'
        self.write(statement, (key, value))

    def value(self, key: str) -> str | None:
        rows = self.query('SELECT value FROM "values" WHERE key = %s', (key,))
        return str(rows[0][0]) if rows else None

    def values(self, prefix: str) -> dict[str, str]:
        rows = self.query('SELECT key, value FROM "values" WHERE starts_with(key, %s)', (prefix,))
        return {str(key): str(value) for key, value in rows}

    def pruner(self) -> PostgresPruner:
        """For `prune.prune`."""
        return PostgresPruner(self.connect(), self.label)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._close_readers()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, statement: str, values: Row) -> int:
        """Run one statement among the other writes; returns the number of rows changed."""
        return self._writer.submit(_one(statement, lambda: values)).result()

    def _connect_writer(self) -> Connection:
        durable = "" if self._synchronous == "FULL" else " -c synchronous_commit=off"
        connection = self.connect(WRITER_OPTIONS + durable)
        try:
            migrate(connection, self.schema, self.label)
            connection.execute(FORGET_WRITERS)
            if self._synchronous == "FULL":  # keep what the server asks for, unless it asks for too little
                connection.execute(
                    "SELECT set_config('synchronous_commit', 'on', false)"
                    " WHERE current_setting('synchronous_commit') = 'off'"
                )
        except psycopg.Error as error:
            connection.close()
            raise StoreError(f"{self.label}: cannot be used as a store: {error}.") from error
        except BaseException:
            connection.close()
            raise
        return connection

    # -- reading ---------------------------------------------------------------------------------------------------

    def query(self, statement: str, values: Row = ()) -> list[Row]:
        """The rows of a SELECT. One retry on a new connection, since a server restart leaves dead ones behind."""
        with self._reader() as reader:
            return reader.query(statement, values)

    def _calls(self, where: str, values: Row) -> list[Call]:
        with self._reader() as reader:
            return [packing.call_from(row, reader.bodies) for row in reader.query(f"{_SELECT_CALLS} {where}", values)]

    def _rollouts(self, where: str, values: Row) -> list[Rollout]:
        rows = self.query(f"SELECT {', '.join(packing.ROLLOUT_COLUMNS)} FROM rollouts {where}", values)
        return [packing.rollout_from(row) for row in rows]

    def _attempts(self, where: str, value: str) -> list[Attempt]:
        rows = self.query(f"SELECT {', '.join(packing.ATTEMPT_COLUMNS)} FROM attempts {where}", (value,))
        return [packing.attempt_from(row) for row in rows]

    @contextmanager
    def _reader(self) -> Iterator[_Reader]:
        """A connection nobody else uses meanwhile."""
        with self._free_readers:
            if self._closed:
                raise StoreError(f"{self.label}: the store is closed.")
            reader = self._readers.pop() if self._readers else _Reader(self.connect)
            try:
                yield reader
            except psycopg.Error as error:
                reader.close()
                raise StoreError(f"{self.label}: cannot read: {error}.") from error
            except BaseException:
                reader.close()
                raise
            self._put_back(reader)

    def _put_back(self, reader: _Reader) -> None:
        self._readers.append(reader)
        if self._closed:  # closed while we read
            self._close_readers()

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def connect(self, options: str = "") -> Connection:
        """A new connection in autocommit mode, whose search path is the store's schema. Raises `StoreError`."""
        conninfo = make_conninfo(**self._conninfo | {"options": f"{self._conninfo['options']} {options}".strip()})
        try:
            connection: Connection = psycopg.connect(conninfo, autocommit=True, prepare_threshold=0)
        except psycopg.Error as error:
            raise StoreError(f"{self.label}: cannot connect: {str(error).strip()}") from error
        connection.adapters.register_dumper(int, Int8Dumper)  # one type for all ints, so one prepared statement
        return connection


class _Reader:
    """A connection for reading, opened at its first use and again when it was lost."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self.bodies = Bodies()
        self._connect = connect
        self._connection: Connection | None = None

    def query(self, statement: str, values: Row) -> list[Row]:
        if self._connection is not None:
            try:
                return self._fetch(self._connection, statement, values)
            except psycopg.OperationalError as error:
                if not is_lost(self._connection, error):
                    raise
                self._connection.close()
        self._connection = self._connect()
        return self._fetch(self._connection, statement, values)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _fetch(self, connection: Connection, statement: str, values: Row) -> list[Row]:
        rows = connection.execute(statement.encode(), to_database(values), binary=True).fetchall()
        return [from_database(row) for row in rows]


# PostgreSQL text can't hold NUL, which harness output and model names of hostile requests do. It becomes two
# characters of Unicode's private use area, of which the first is an escape.
_ESCAPE, _NUL, _SELF = "\ue000", "\ue000\ue001", "\ue000\ue002"


def to_database(row: Row) -> Row:
    return tuple(_escaped(value) if isinstance(value, str) else value for value in row)


def from_database(row: Row) -> Row:
    return tuple(_unescaped(value) if isinstance(value, str) and _ESCAPE in value else value for value in row)


def _escaped(text: str) -> str:
    if _ESCAPE in text or "\0" in text:
        return text.replace(_ESCAPE, _SELF).replace("\0", _NUL)
    return str(text)  # of an enum only its text


def _unescaped(text: str) -> str:
    return text.replace(_NUL, "\0").replace(_SELF, _ESCAPE)


_SELECT_CALLS = f"SELECT seq, {', '.join(packing.CALL_COLUMNS)} FROM calls"
_SELECT_SESSIONS = f"SELECT {', '.join(packing.SESSION_COLUMNS)} FROM sessions"
# Not ON CONFLICT, which would use up a number for each call that is there already. The lock makes the check safe.
_INSERT_CALL = (
    f"INSERT INTO calls (seq, {', '.join(packing.CALL_COLUMNS)})"
    f" SELECT nextval('calls_seq'), {', '.join(['%s'] * len(packing.CALL_COLUMNS))}"
    " WHERE NOT EXISTS (SELECT FROM calls WHERE id = %s) RETURNING seq"
)


def _insert_into(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))})"


def _one(statement: str, row: Callable[[], Row], taken: str = "") -> Operation:
    return Operation(statement, lambda: [to_database(row())], taken)


def _conninfo(url: str, schema: str) -> dict[str, str]:
    """Connection parameters of `url`, with ours where it is silent. Raises `ConfigError`, which shows no password."""
    try:
        given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error as error:
        raise ConfigError(f"store: this is no URL like postgresql://user:password@host/database: {error}.") from None
    options = f"{given.get('options', '')} -c search_path={schema}".strip()
    return CONNECTION | given | {"client_encoding": "utf8", "options": options}


def _label(conninfo: dict[str, str]) -> str:
    host, port = conninfo.get("host", ""), conninfo.get("port", "")
    return f"postgresql://{host}{':' if port else ''}{port}/{conninfo.get('dbname', '')}"
