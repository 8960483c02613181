"""The thread that owns the writing connection to PostgreSQL and commits in groups (see `write_queue`).

A group is two round trips: everything up to the results in one pipeline, then the commit. When the connection breaks
after the commit was sent, nobody has said whether it happened. So each group also writes its number into the row of
this writer in `writers`; a new connection waits for the store's lock, which the old transaction holds until it has
ended on the server, and reads that number: the group is then either acknowledged or run again, never twice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from itertools import groupby
from typing import Any

import psycopg

from outrider.errors import StoreError
from outrider.stores.postgres_schema import LOCK, Connection
from outrider.stores.write_queue import Outcome, Work, WriteQueue

# What one bad row raises; anything else (connection, full disk, lock timeout) fails the whole group.
ROW_ERRORS = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.ProgrammingError,
    ArithmeticError,
    TypeError,
    ValueError,
)
# Other processes wait while a group is being committed, so that one must not be huge.
MAX_GROUP_BYTES = 16 << 20
TRIES = 3
RETRY_PAUSE_S = 0.2

_LEDGER = """
    INSERT INTO writers VALUES (%s, %s, now())
    ON CONFLICT (id) DO UPDATE SET last_group = excluded.last_group, seen_at = excluded.seen_at"""


def is_lost(connection: Connection, error: psycopg.Error) -> bool:
    """True where the server has gone or is going, by `error` or because the connection is closed already."""
    return connection.closed or (error.sqlstate or "").startswith("57P")


class PostgresWriter(WriteQueue):
    """Commits `Operation`s. `connect` gives a connection in autocommit mode.

    A connection that turns out to be lost is made anew, once; where that fails the group fails with `StoreError`,
    as later ones do until the server is back. Only when the outcome of a commit is unknown is the server awaited,
    for up to `resolve_s` seconds; after that the group fails, and may or may not be in the store.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        label: str,
        max_queued: int,
        max_queued_bytes: int,
        resolve_s: float,
    ) -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._resolve_s = resolve_s
        self._id = uuid.uuid4().hex
        self._group = 0
        super().__init__(
            label,
            max_queued=max_queued,
            max_queued_bytes=max_queued_bytes,
            max_group_bytes=MAX_GROUP_BYTES,
        )

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def commit_group(self, work: Work) -> list[Outcome]:
        lost: psycopg.Error | None = None
        for _ in range(TRIES):
            connection = self._connected()
            self._group += 1
            try:
                results = self._execute(connection, work)
            except psycopg.OperationalError as error:
                if not is_lost(connection, error):
                    raise
                lost = error  # before COMMIT was sent: surely not committed
                self.disconnect()
                continue
            try:
                connection.commit()
                return results
            except psycopg.Error as error:
                lost = error
                if self._was_committed():
                    return results
        raise StoreError(f"{self.label}: the connection was lost {TRIES} times in a row: {lost}.") from lost

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def _execute(self, connection: Connection, work: Work) -> list[Outcome]:
        """Everything but the commit."""
        try:
            cursors: list[tuple[psycopg.Cursor[Any], Work]] = []
            with connection.pipeline():
                self._begin(connection)
                for statement, together in groupby(work, key=lambda item: item[0].statement):
                    run, cursor = list(together), connection.cursor()
                    rows = [row for _, rows in run for row in rows]
                    cursor.executemany(statement.encode(), rows, returning=True)
                    cursors.append((cursor, run))
            return [result for cursor, run in cursors for result in self._results(cursor, run)]
        except ROW_ERRORS:
            connection.rollback()
            return self._execute_one_by_one(connection, work)

    def _execute_one_by_one(self, connection: Connection, work: Work) -> list[Outcome]:
        """As `_execute`, slower: finds out which ones are bad and keeps the others."""
        results: list[Outcome] = []
        self._begin(connection)
        for operation, rows in work:
            connection.execute("SAVEPOINT one")
            try:
                with connection.cursor() as cursor:
                    cursor.executemany(operation.statement.encode(), rows, returning=True)
                    results += self._results(cursor, [(operation, rows)])
            except ROW_ERRORS as error:
                connection.execute("ROLLBACK TO SAVEPOINT one")
                results.append(self._row_error(error))
            connection.execute("RELEASE SAVEPOINT one")
        return results

    def _begin(self, connection: Connection) -> None:
        connection.execute("BEGIN")
        connection.execute(LOCK)
        connection.execute(_LEDGER, (self._id, self._group))

    def _results(self, cursor: psycopg.Cursor[Any], run: Work) -> list[Outcome]:
        """One for each operation of `run`, whose rows all went through `cursor`."""
        results: list[Outcome] = []
        for operation, rows in run:
            changed, returned = 0, None
            for _ in rows:
                changed += cursor.rowcount
                returned = cursor.fetchone() if cursor.description else None
                cursor.nextset()
            if not operation.taken:
                results.append(changed)
            elif returned is None:
                results.append(StoreError(f"{self.label}: {operation.taken}"))
            else:
                results.append(returned[0])
        return results

    def _was_committed(self) -> bool:
        """Whether the last group is in the store, once its transaction has ended. Raises `StoreError` when too late."""
        deadline = time.monotonic() + self._resolve_s
        while True:
            self.disconnect()
            try:
                connection = self._connected()
                with connection.transaction():
                    connection.execute(LOCK)
                    found = connection.execute("SELECT last_group FROM writers WHERE id = %s", (self._id,)).fetchone()
                return found == (self._group,)
            except (psycopg.Error, StoreError) as error:
                if time.monotonic() > deadline:
                    raise StoreError(
                        f"{self.label}: the connection was lost during a commit and could not be made again within "
                        f"{self._resolve_s:g} s; what was written may or may not be there: {error}"
                    ) from error
                time.sleep(RETRY_PAUSE_S)
