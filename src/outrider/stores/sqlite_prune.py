"""How a SQLite store is pruned: short transactions, then free pages go back to the file system bit by bit."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.errors import StoreError
from outrider.stores.prune import DELETES, PAUSE, UNCHANGED, Candidate, candidates_sql

PAGES_AT_ONCE = 512
BUSY_TIMEOUT_S = 30.0
# SQLite's own wait for the lock asks up to ten times a second, and would seldom hit the moment between two commits of
# a busy gateway.
BUSY_POLL_S = 0.001
INCREMENTAL = 2  # of PRAGMA auto_vacuum


class SqlitePruner:
    """Satisfies `prune.Pruner` for a file in WAL mode, whose readers and pages are not held up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        # No fsync at each commit while writers wait: a removal that a power cut takes back does no harm.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def candidates(self) -> list[Candidate]:
        with self._told():
            rows = self._connection.execute(candidates_sql(greatest="max", size="length"))
            return [Candidate(*row) for row in rows]

    def size(self) -> int:
        with self._told():
            return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._told():
            self._begin()
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def delete(self, candidate: Candidate) -> bool:
        id = candidate.attempt_id
        if not self._connection.execute(UNCHANGED.format("?"), (id, id, candidate.last_seq)).fetchone():
            return False
        for statement in DELETES:
            self._connection.execute(statement.format("?"), (id,))
        return True

    def give_back(self) -> int:
        """The file shrinks as its WAL is copied into it, here and at the writers' next checkpoints.

        A file that was made without incremental vacuum keeps its size, and its free pages are used again; stop all
        that use it and run ``PRAGMA auto_vacuum = 2; VACUUM`` to change that.
        """
        with self._told():
            if self._pragma("auto_vacuum") != INCREMENTAL:
                return 0
            before = self._pragma("page_count")
            while self._pragma("freelist_count"):
                with self.transaction():
                    began = time.monotonic()
                    self._connection.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
                time.sleep(PAUSE * (time.monotonic() - began))
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # one that waits for nobody
            return max(0, before - self._pragma("page_count")) * self._pragma("page_size")

    def close(self) -> None:
        self._connection.close()

    def _begin(self) -> None:
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(BUSY_POLL_S)

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: cannot be pruned: {error}.") from error
