"""The embedded store: one SQLite file in WAL mode, opened by gateway, trainer and inspection at the same time."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from outrider.errors import StoreError
from outrider.stores import packing
from outrider.stores.group_writer import GroupWriter
from outrider.stores.packing import Row
from outrider.stores.row_store import RowStore, insert_into
from outrider.stores.sqlite_prune import SqlitePruner
from outrider.stores.sqlite_schema import migrate
from outrider.stores.write_queue import Operation

BUSY_TIMEOUT_S = 30.0
WAL_LIMIT_BYTES = 64 << 20


class SqliteStore(RowStore):
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
        self._readers: deque[sqlite3.Connection] = deque()
        self._closed = False
        super().__init__(insert_call=insert_into("calls", packing.CALL_COLUMNS))
        self._connect_writer().close()  # so that a file that is no store is told here, not at the first write
        self._writer = GroupWriter(
            self._connect_writer, label=self._label, max_queued=max_queued, max_queued_bytes=max_queued_bytes
        )

    @property
    def pending(self) -> int:
        """Writes that are not durable yet."""
        return self._writer.pending

    def pruner(self) -> SqlitePruner:
        """For `prune.prune`."""
        return SqlitePruner(self.path)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._close_readers()

    def submit(self, operation: Operation, size: int = 0) -> Future[int]:
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

    def query(self, statement: str, values: Row = ()) -> list[Row]:
        """The rows of a SELECT, read as the store was at one moment."""
        reader = self._take_reader()
        try:
            rows = reader.execute(statement, values).fetchall()
        except BaseException as error:
            reader.close()
            if isinstance(error, sqlite3.Error):
                raise StoreError(f"{self._label}: cannot read: {error}.") from error
            raise
        self._readers.append(reader)
        if self._closed:  # closed while we read
            self._close_readers()
        return rows

    def _take_reader(self) -> sqlite3.Connection:
        """A connection that nobody else uses now; as many exist as there were readers at the same time."""
        if self._closed:
            raise StoreError(f"{self._label}: the store is closed.")
        try:
            return self._readers.pop()
        except IndexError:
            return self._connect()

    def _close_readers(self) -> None:
        while self._readers:
            self._readers.pop().close()

    def _connect(self) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except sqlite3.Error as error:
            raise StoreError(f"{self._label}: cannot be opened: {_why(self.path) or error}.") from error


def _why(path: Path) -> str:
    """What SQLite does not say; empty where there is nothing to be seen."""
    folder = path.absolute().parent
    if path.is_dir():
        return "it is a folder; name a file in it, such as store.sqlite3"
    if not folder.is_dir():
        hint = "" if path.is_absolute() else " (an absolute path has four slashes: sqlite:////srv/store.sqlite3)"
        return f"there is no folder {folder}; make it with mkdir -p, or name another path{hint}"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"this user may not write {path.absolute() if path.exists() else f'in {folder}'}"
    return ""


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
