"""Copy a SQLite store while gateways write to it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError, StoreError
from outrider.protocols import Store
from outrider.stores.sqlite import SqliteStore

PAGES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupCounts:
    calls: int
    size: int
    """Bytes of the copy."""


def backup_store(store: Store, out: Path, *, progress: Callable[[int, int], None] | None = None) -> BackupCounts:
    """Write the store as it is now to the new file `out`, which is a store too, and check it.

    The copy is of one moment: all of it is read in one snapshot. Nobody waits for that, but the WAL keeps what is
    written meanwhile until the copy is complete, so it grows by that much. `out` appears when the copy is checked and
    on disk; until then ``OUT.partial`` grows beside it. `progress` gets the numbers of pages done and in all.

    PostgreSQL brings its own tool, ``pg_dump``. Raises `ConfigError`, `StoreError`.
    """
    if not isinstance(store, SqliteStore):
        raise ConfigError(
            f"backup: this copies SQLite stores, not a {type(store).__name__}. For PostgreSQL take its own tool: "
            "pg_dump --format=custom --schema=outrider --file=FILE URL, and pg_restore to bring it back."
        )
    if out.exists():
        raise ConfigError(f"{out}: exists; name a new file for the backup.")
    partial = out.with_name(out.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        calls = _copy(store.path, partial, progress)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(out)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{out}: the backup failed: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return BackupCounts(calls=calls, size=out.stat().st_size)


def _copy(source_path: Path, target_path: Path, progress: Callable[[int, int], None] | None) -> int:
    """Returns the number of calls in the copy."""
    with (
        contextlib.closing(sqlite3.connect(source_path, isolation_level=None)) as source,
        contextlib.closing(sqlite3.connect(target_path, isolation_level=None)) as target,
    ):
        target.execute("PRAGMA synchronous = OFF")  # the whole file is synced at the end
        # An open snapshot: without one, each write of another process between two steps makes the copy start over.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM calls").fetchone()

        def step(status: int, remaining: int, total: int) -> None:
            if progress is not None:
                progress(total - remaining, total)

        source.backup(target, pages=PAGES_AT_ONCE, progress=step)
        source.execute("ROLLBACK")
        problems = target.execute("PRAGMA integrity_check").fetchall()
        if problems != [("ok",)]:
            raise StoreError(f"{target_path}: the copy is damaged: {problems[0][0]}.")
        return int(target.execute("SELECT count(*) FROM calls").fetchone()[0])
