"""A bounded queue with one thread behind it that commits in groups; what a commit is, a store says.

Whatever was queued while the last commit ran goes into the next one: a lone writer pays one commit and no delay, a
crowd shares it. There is no timer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from outrider.errors import OutriderError, StoreBusy, StoreError
from outrider.stores.packing import Row

LONE_GROUPS = 16


class Operation(NamedTuple):
    """One statement, run for each of `rows`. `rows` is called on the writer thread, before the transaction begins.

    The result is the number of rows changed, or where there is `taken`, the number that the one new row was given;
    when there is no new row, the operation fails with `taken`.
    """

    statement: str
    rows: Callable[[], list[Row]]
    taken: str = ""


Work = list[tuple[Operation, list[Row]]]
Outcome = int | OutriderError


class _Job(NamedTuple):
    operation: Operation
    future: Future[int]
    size: int


class WriteQueue(ABC):
    """Hands operations, in order, to `commit_group`. `label` names the store in messages. An operation fails alone
    where its rows can't be made.

    A subclass must be ready before it calls this constructor, which starts the thread.
    """

    def __init__(
        self,
        label: str,
        *,
        max_queued: int,
        max_queued_bytes: int,
        max_group_bytes: int | None = None,
    ) -> None:
        self.label = label
        self._max_queued = max_queued
        self._max_queued_bytes = max_queued_bytes
        self._max_group_bytes = max_queued_bytes if max_group_bytes is None else max_group_bytes
        self._queue: deque[_Job] = deque()
        self._pending = 0  # jobs queued or being committed
        self._pending_bytes = 0
        self._closing = False
        self._lone_groups = LONE_GROUPS
        self._yields = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"writer {label}", daemon=True)
        self._thread.start()

    @abstractmethod
    def commit_group(self, work: Work) -> list[Outcome]:
        """Run and commit all in one transaction; returns each one's result, or the error that it alone failed with.

        What it raises fails the whole group. Called on the writer thread only.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Release the connection, rolling back what is open; the next commit makes a new one. On the writer thread."""

    def submit(self, operation: Operation, size: int = 0) -> Future[int]:
        """Queue `operation`, which holds about `size` bytes. Raises `StoreBusy` when the queue is full."""
        future: Future[int] = Future()
        with self._changed:
            if self._closing:
                raise StoreError(f"{self.label}: the store is closed.")
            # One job is always taken, however large, or it never could be.
            over = self._pending_bytes + size > self._max_queued_bytes and self._pending > 0
            if over or self._pending >= self._max_queued:
                raise StoreBusy(f"{self.label}: {self._pending} writes are waiting to be committed; try again later.")
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
                group = self._next_group()
            if not group:
                break
            self._yield_to_callers(len(group))
            self._commit(group)
            del group  # the bodies in it may be large, and the next one may be long in coming
        self.disconnect()

    def _yield_to_callers(self, jobs: int) -> None:
        """In a crowd, don't interrupt the threads that make calls: a larger group later costs less than two now.

        Linux lets a thread of `SCHED_BATCH` wait for a free core or its turn. A caller that is alone waits for nothing:
        after some groups of one job they run at once again.
        """
        self._lone_groups = 0 if jobs > 1 else self._lone_groups + 1
        yields = self._lone_groups < LONE_GROUPS
        if yields != self._yields and hasattr(os, "sched_setscheduler"):
            self._yields = yields
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH if yields else os.SCHED_OTHER, os.sched_param(0))

    def _next_group(self) -> list[_Job]:
        """All that is queued, as far as a group may be large; at least one job."""
        group: list[_Job] = []
        size = 0
        while self._queue and (not group or size + self._queue[0].size <= self._max_group_bytes):
            group.append(self._queue.popleft())
            size += group[-1].size
        return group

    def _commit(self, group: list[_Job]) -> None:
        size = sum(job.size for job in group)
        taken = [job for job in group if job.future.set_running_or_notify_cancel()]
        outcomes = self._outcomes([job.operation for job in taken])
        with self._changed:
            self._pending -= len(group)
            self._pending_bytes -= size
        for job, outcome in zip(taken, outcomes, strict=True):
            if isinstance(outcome, OutriderError):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)

    def _outcomes(self, operations: list[Operation]) -> list[Outcome]:
        outcomes: list[Outcome] = [0] * len(operations)
        work: Work = []
        positions = []
        for position, operation in enumerate(operations):
            try:
                work.append((operation, operation.rows()))
                positions.append(position)
            except Exception as error:  # whatever it is: without this thread nobody would ever be answered again
                outcomes[position] = self._row_error(error)
        try:
            found = self.commit_group(work) if work else []
        except Exception as error:
            self.disconnect()
            found = [_failed(self.label, error)] * len(work)
        for position, outcome in zip(positions, found, strict=True):
            outcomes[position] = outcome
        return outcomes

    def _row_error(self, error: Exception) -> StoreError:
        return StoreError(f"{self.label}: {error}")


def _failed(label: str, error: Exception) -> OutriderError:
    if isinstance(error, OutriderError):
        return error
    failure = StoreError(f"{label}: cannot write: {error}.")
    failure.__cause__ = error
    return failure
