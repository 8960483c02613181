"""One thread that owns the writing connection and commits in groups.

Whatever was queued while the last commit ran goes into the next one: a lone writer pays one fsync and no delay, a
crowd shares it. There is no timer.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from outrider.errors import OutriderError, StoreBusy, StoreError

T = TypeVar("T")

# What one bad row raises; anything else from SQLite (full disk, I/O error, lock) fails the whole group.
ROW_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, ArithmeticError, TypeError, ValueError)


class _Job(NamedTuple):
    operation: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    size: int


class GroupWriter:
    """Runs operations in order, each in one transaction with its neighbours.

    An operation must leave nothing behind when it raises one of `ROW_ERRORS`, which a single statement does by itself.
    `label` names the file in messages. The connection comes from `connect`, in autocommit mode, and is opened anew
    after a failed commit, so that a disk that was full for a while needs no restart.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], *, label: str, max_queued: int, max_queued_bytes: int
    ) -> None:
        self._connect = connect
        self._label = label
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._connection: sqlite3.Connection | None = None
        self._queue: deque[_Job] = deque()
        self._pending = 0  # jobs queued or being committed
        self._pending_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"writer {label}", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[sqlite3.Connection], T], size: int = 0) -> Future[T]:
        """Queue `operation`, which holds about `size` bytes. Raises `StoreBusy` when the queue is full."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise StoreError(f"{self._label}: the store is closed.")
            # One job is always taken, however large, or it never could be.
            over = self._pending_bytes + size > self._max_queued_bytes and self._pending > 0
            if over or self._pending >= self._max_queued:
                raise StoreBusy(f"{self._label}: {self._pending} writes are waiting for the disk; try again later.")
            self._queue.append(_Job(operation, future, size))
            self._pending += 1
            self._pending_bytes += size
            self._changed.notify()
        return future

    @property
    def pending(self) -> int:
        """Operations that are not durable yet."""
        return self._pending

    def close(self) -> None:
        """Commit what is queued, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                group = list(self._queue)
                self._queue.clear()
            if not group:
                break
            self._commit(group)
        self._disconnect()

    def _commit(self, group: list[_Job]) -> None:
        group = [job for job in group if job.future.set_running_or_notify_cancel()]
        outcomes: list[Any] = []
        try:
            if self._connection is None:
                self._connection = self._connect()
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            for job in group:
                try:
                    outcomes.append(job.operation(connection))
                except ROW_ERRORS as error:
                    if not connection.in_transaction:
                        raise
                    outcomes.append(StoreError(f"{self._label}: {error}"))
            connection.execute("COMMIT")
        except Exception as error:
            self._disconnect()
            outcomes = [_failed(self._label, error)] * len(group)
        with self._changed:
            self._pending -= len(group)
            self._pending_bytes -= sum(job.size for job in group)
        for job, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, OutriderError):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    def _disconnect(self) -> None:
        """Close, which rolls back what was open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass  # the file is in trouble already, and that has been told


def _failed(label: str, error: Exception) -> OutriderError:
    if isinstance(error, OutriderError):
        return error
    failure = StoreError(f"{label}: cannot write: {error}.")
    failure.__cause__ = error
    return failure
