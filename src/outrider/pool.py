"""Threads for work that may never end, such as a user's reward function that hangs.

`concurrent.futures.ThreadPoolExecutor` waits for its threads when the process ends, so one that hangs keeps the process
for ever. These are daemons: the process ends without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class DaemonPool(Generic[T]):
    """At most `threads` of them, started as work comes."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._work: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """From one thread only."""
        future: Future[T] = Future()
        self._work.put((future, work))
        if len(self._threads) < self._most:
            name = f"{self._name}_{len(self._threads)}"
            self._threads.append(threading.Thread(target=_run, args=(self._work,), name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        """Take no more work; threads end once what is queued is done. Returns at once."""
        while cancel_futures:
            try:
                queued = self._work.get_nowait()
            except Empty:
                break
            if queued is not None:
                queued[0].cancel()
        for _ in self._threads:
            self._work.put(None)


def _run(work: SimpleQueue[tuple[Future[T], Callable[[], T]] | None]) -> None:
    while (queued := work.get()) is not None:
        future, call = queued
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:  # it is the one's who waits for it
            future.set_exception(error)
        del queued, future, call  # else kept while there is nothing to do
