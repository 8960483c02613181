"""The thread that owns the writing connection of a SQLite file and commits in groups (see `write_queue`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from itertools import groupby

from outrider.errors import StoreError
from outrider.stores.packing import Row
from outrider.stores.write_queue import Operation, Outcome, Work, WriteQueue

# What one bad row raises; anything else from SQLite (full disk, I/O error, lock) fails the whole group.
ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, ArithmeticError, TypeError, ValueError)
# Rows in one INSERT. For each statement the thread gives up the interpreter and has to wait for it again, which costs
# more than the row. This many rows of calls stay below the 999 parameters of old SQLite versions, and the statements of
# all sizes find room in the connection's cache.
ROWS_AT_ONCE = 32


class GroupWriter(WriteQueue):
    """Runs operations in order, each in one transaction with its neighbours.

    The connection comes from `connect`, in autocommit mode, and is opened anew after a failed commit, so that a disk
    that was full for a while needs no restart.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], *, label: str, max_queued: int, max_queued_bytes: int
    ) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        super().__init__(label, max_queued=max_queued, max_queued_bytes=max_queued_bytes)

    def commit_group(self, work: Work) -> list[Outcome]:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        outcomes: list[Outcome] = []
        for (statement, together), run in groupby(work, key=_kind):
            if together:
                outcomes += self._insert(connection, statement, list(run))
            else:
                outcomes += [self._one(connection, operation, rows) for operation, rows in run]
        connection.execute("COMMIT")
        return outcomes

    def disconnect(self) -> None:
        """Close, which rolls back what was open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass  # the file is in trouble already, and that has been told

    def _insert(self, connection: sqlite3.Connection, statement: str, work: Work) -> list[Outcome]:
        """Rows of one table, many at once; one by one where one of them is bad."""
        outcomes: list[Outcome] = []
        for at in range(0, len(work), ROWS_AT_ONCE):
            some = work[at : at + ROWS_AT_ONCE]
            try:
                outcomes += _numbers(connection, statement, some)
            except ROW_ERRORS:
                if not connection.in_transaction:
                    raise  # else the statement has left nothing behind
                outcomes += [self._one(connection, operation, rows) for operation, rows in some]
        return outcomes

    def _one(self, connection: sqlite3.Connection, operation: Operation, rows: list[Row]) -> Outcome:
        try:
            if len(rows) > 1:
                return _all_or_none(connection, operation.statement, rows)
            cursor = connection.execute(operation.statement, rows[0])
        except ROW_ERRORS as error:
            if not connection.in_transaction:
                raise
            return self._row_error(error)
        if not operation.taken:
            return cursor.rowcount
        return (cursor.lastrowid or 0) if cursor.rowcount else StoreError(f"{self.label}: {operation.taken}")


def _numbers(connection: sqlite3.Connection, statement: str, work: Work) -> list[Outcome]:
    """Insert the rows with one statement; the numbers they were given, which follow each other."""
    marks = statement[statement.rindex("(") :]
    values = [value for _, rows in work for value in rows[0]]
    last = connection.execute(statement + f", {marks}" * (len(work) - 1), values).lastrowid or 0
    return list(range(last - len(work) + 1, last + 1))


def _all_or_none(connection: sqlite3.Connection, statement: str, rows: list[Row]) -> int:
    connection.execute("SAVEPOINT rows")
    try:
        return connection.executemany(statement, rows).rowcount
    except ROW_ERRORS:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO rows")
        raise
    finally:
        if connection.in_transaction:
            connection.execute("RELEASE rows")


def _kind(item: tuple[Operation, list[Row]]) -> tuple[str, bool]:
    """Its statement, and whether rows of several operations can go into one: each has a row that is given a number."""
    operation, rows = item
    return operation.statement, bool(operation.taken) and len(rows) == 1 and operation.statement.endswith(")")
