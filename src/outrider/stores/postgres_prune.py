"""How a PostgreSQL store is pruned: short transactions under the store's lock, then VACUUM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from outrider.errors import StoreError
from outrider.stores.postgres_schema import LOCK, Connection
from outrider.stores.prune import DELETES, UNCHANGED, Candidate, candidates_sql

TABLES = ("calls", "rewards", "sessions", "attempts")
_CANDIDATES = candidates_sql(greatest="greatest", size="pg_column_size").encode()
_ALL = candidates_sql(greatest="greatest", size="pg_column_size", in_use=True).encode()


class PostgresPruner:
    """Satisfies `prune.Pruner`. Text is as the database holds it (see `postgres.to_database`)."""

    def __init__(self, connection: Connection, label: str) -> None:
        self._connection = connection
        self._label = label
        # No flush at each commit while writers wait: a removal that a crash takes back does no harm.
        connection.execute("SET synchronous_commit = off")

    def candidates(self) -> list[Candidate]:
        with self._told():
            return [Candidate(*row) for row in self._connection.execute(_CANDIDATES)]

    def size(self) -> int:
        """Bytes of calls and attempts, compressed as they are; files are larger by what is free in them."""
        with self._told():
            return sum(Candidate(*row).size for row in self._connection.execute(_ALL))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._told(), self._connection.transaction():
            self._connection.execute(LOCK)
            yield

    def delete(self, candidate: Candidate) -> bool:
        id = candidate.attempt_id
        unchanged = self._connection.execute(UNCHANGED.format("%s").encode(), (id, id, candidate.last_seq))
        if not unchanged.fetchone():
            return False
        for statement in DELETES:
            self._connection.execute(statement.format("%s").encode(), (id,))
        return True

    def give_back(self) -> int:
        """Room becomes free for later calls. Only what lies at the end of a file goes back to the file system.

        ``VACUUM FULL`` gives all back, but keeps readers and writers out for as long as it takes.
        """
        with self._told():
            before = self._file_size()
            self._connection.execute(f"VACUUM {', '.join(TABLES)}".encode())
            return before - self._file_size()

    def close(self) -> None:
        self._connection.close()

    def _file_size(self) -> int:
        sizes = " + ".join(f"pg_total_relation_size('{table}')" for table in TABLES)
        (size,) = self._connection.execute(f"SELECT ({sizes})::bigint".encode()).fetchone() or (0,)
        return int(size)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise StoreError(f"{self._label}: cannot be pruned: {error}.") from error
