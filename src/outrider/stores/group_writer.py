"""The thread that owns the writing connection of a SQLite file and commits in groups (see `write_queue`)."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from outrider.errors import StoreError
from outrider.stores.write_queue import WriteQueue

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], Any]

# What one bad row raises; anything else from SQLite (full disk, I/O error, lock) fails the whole group.
ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, ArithmeticError, TypeError, ValueError)


class GroupWriter(WriteQueue[Operation]):
    """Runs operations in order, each in one transaction with its neighbours.

    An operation must leave nothing behind when it raises one of `ROW_ERRORS`, which a single statement does by itself.
    `label` names the file in messages. The connection comes from `connect`, in autocommit mode, and is opened anew
    after a failed commit, so that a disk that was full for a while needs no restart.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], *, label: str, max_queued: int, max_queued_bytes: int
    ) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        super().__init__(label, max_queued=max_queued, max_queued_bytes=max_queued_bytes)

    def submit(self, operation: Callable[[sqlite3.Connection], T], size: int = 0) -> Future[T]:
        """Queue `operation`, which holds about `size` bytes. Raises `StoreBusy` when the queue is full."""
        return self._submit(operation, size)

    def commit_group(self, operations: list[Operation]) -> list[Any]:
        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        outcomes: list[Any] = []
        for operation in operations:
            try:
                outcomes.append(operation(connection))
            except ROW_ERRORS as error:
                if not connection.in_transaction:
                    raise
                outcomes.append(StoreError(f"{self.label}: {error}"))
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
