"""The store for several gateways: a PostgreSQL schema that all of them write at the same time."""

from __future__ import annotations

import functools
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Literal

from outrider.errors import ConfigError, SetupError, StoreError
from outrider.stores import packing
from outrider.stores.packing import Row
from outrider.stores.row_store import RowStore
from outrider.stores.write_queue import Operation
from outrider.types import Call

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.types.numeric import Int8Dumper
except ImportError as error:
    raise SetupError("The PostgreSQL store needs psycopg: pip install 'outrider[postgres]'.") from error

from outrider.stores.postgres_prune import PostgresPruner
from outrider.stores.postgres_schema import Connection, migrate
from outrider.stores.postgres_writer import PostgresWriter, is_lost

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
_NO_PASSWORD = ". The URL names none (a run folder does not keep it): set PGPASSWORD, or write it into ~/.pgpass."
FORGET_WRITERS = "DELETE FROM writers WHERE seen_at < now() - interval '7 days'"


class PostgresStore(RowStore):
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
        super().__init__(insert_call=_INSERT_CALL, returning=" RETURNING {}")
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

    def pruner(self) -> PostgresPruner:
        """For `prune.prune`."""
        return PostgresPruner(self.connect(), self.label)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._close_readers()

    def submit(self, operation: Operation, size: int = 0) -> Future[int]:
        statement, rows, taken = operation
        return self._writer.submit(Operation(_marked(statement), lambda: list(map(to_database, rows())), taken), size)

    def call_row(self, call: Call) -> Row:
        return (*super().call_row(call), call.id)

    def query(self, statement: str, values: Row = ()) -> list[Row]:
        """The rows of a SELECT. One retry on a new connection, since a server restart leaves dead ones behind."""
        with self._reader() as reader:
            return reader.query(_marked(statement), values)

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
            missing = _NO_PASSWORD if "no password supplied" in str(error) else ""
            raise StoreError(f"{self.label}: cannot connect: {str(error).strip()}{missing}") from error
        connection.adapters.register_dumper(int, Int8Dumper)  # one type for all ints, so one prepared statement
        return connection


class _Reader:
    """A connection for reading, opened at its first use and again when it was lost."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
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


# Not ON CONFLICT, which would use up a number for each call that is there already. The lock makes the check safe.
_INSERT_CALL = (
    f"INSERT INTO calls (seq, {', '.join(packing.CALL_COLUMNS)})"
    f" SELECT nextval('calls_seq'), {', '.join('?' * len(packing.CALL_COLUMNS))}"
    " WHERE NOT EXISTS (SELECT FROM calls WHERE id = ?) RETURNING seq"
)


@functools.lru_cache(None)
def _marked(statement: str) -> str:
    return statement.replace("?", "%s")


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
