"""Tables of the PostgreSQL store, as an append-only list of migrations: never edit one that was released, add one."""

from __future__ import annotations

from typing import Any

import psycopg

from outrider.errors import StoreError

Connection = psycopg.Connection[tuple[Any, ...]]

# Held from the first statement to the end of each transaction that writes. Sequences alone give numbers in the order
# of `nextval`, not of commits: a slow transaction's small number would appear after a follower has passed it. Under
# this lock a number is taken only once every smaller one is committed or rolled back, since PostgreSQL makes a commit
# visible before it releases the transaction's locks. It also makes writers of one store strictly serial, so none can
# deadlock with another, and it tells when a lost connection's transaction is over.
# The key is one for each schema, so that two stores in one database don't wait for each other.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('outrider ' || current_schema(), 0))"

# Columns hold what the SQLite store's do. Bodies are compressed already: EXTERNAL spares the server from trying again.
# `writers` says of each writing process which of its groups was the last to commit (see `postgres_writer`).
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE SEQUENCE calls_seq",
        """CREATE TABLE calls (
            seq BIGINT PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            attempt_id TEXT NOT NULL,
            dialect TEXT NOT NULL,
            model TEXT NOT NULL,
            state TEXT NOT NULL,
            status BIGINT NOT NULL,
            streamed BOOLEAN NOT NULL,
            prompt_tokens BIGINT,
            completion_tokens BIGINT,
            fidelity TEXT NOT NULL,
            fidelity_reason TEXT NOT NULL,
            sampling TEXT NOT NULL,
            version_start BIGINT,
            version_end BIGINT,
            started_at DOUBLE PRECISION NOT NULL,
            duration_s DOUBLE PRECISION NOT NULL,
            first_token_s DOUBLE PRECISION,
            error TEXT NOT NULL,
            choices TEXT NOT NULL,
            prompt_ids BYTEA,
            token_ids BYTEA NOT NULL,
            logprobs BYTEA NOT NULL,
            request BYTEA NOT NULL,
            response BYTEA NOT NULL
        )""",
        "ALTER SEQUENCE calls_seq OWNED BY calls.seq",
        """ALTER TABLE calls
            ALTER logprobs SET STORAGE EXTERNAL,
            ALTER request SET STORAGE EXTERNAL,
            ALTER response SET STORAGE EXTERNAL""",
        "CREATE INDEX calls_by_attempt ON calls (attempt_id, seq)",
        """CREATE TABLE rewards (
            seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            attempt_id TEXT NOT NULL,
            name TEXT NOT NULL,
            value DOUBLE PRECISION NOT NULL,
            reason TEXT NOT NULL,
            parts TEXT NOT NULL,
            source TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL
        )""",
        "CREATE INDEX rewards_by_attempt ON rewards (attempt_id, seq)",
        """CREATE TABLE sessions (
            key_hash TEXT PRIMARY KEY,
            attempt_id TEXT NOT NULL,
            mode TEXT NOT NULL,
            sampling TEXT NOT NULL,
            allow_feedback BOOLEAN NOT NULL,
            expires_at DOUBLE PRECISION,
            sealed BOOLEAN NOT NULL
        )""",
        "CREATE INDEX sessions_by_attempt ON sessions (attempt_id)",
        """CREATE TABLE rollouts (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            task_id TEXT NOT NULL,
            task_fields TEXT NOT NULL,
            group_id TEXT NOT NULL,
            split TEXT NOT NULL,
            step BIGINT NOT NULL,
            mode TEXT NOT NULL,
            sampling TEXT NOT NULL,
            state TEXT NOT NULL,
            attempt BIGINT NOT NULL,
            reward DOUBLE PRECISION,
            failure TEXT NOT NULL,
            reason TEXT NOT NULL
        )""",
        "CREATE INDEX rollouts_by_use ON rollouts (split, step, state)",
        """CREATE TABLE attempts (
            id TEXT PRIMARY KEY,
            rollout_id TEXT NOT NULL,
            number BIGINT NOT NULL,
            started_at DOUBLE PRECISION NOT NULL,
            ended_at DOUBLE PRECISION,
            exit_code BIGINT,
            signal BIGINT,
            timed_out BOOLEAN NOT NULL,
            failure TEXT NOT NULL,
            reason TEXT NOT NULL,
            stdout_tail TEXT NOT NULL,
            stderr_tail TEXT NOT NULL
        )""",
        "CREATE INDEX attempts_by_rollout ON attempts (rollout_id, number)",
        'CREATE TABLE "values" (key TEXT PRIMARY KEY, value TEXT NOT NULL)',
        "CREATE TABLE writers (id TEXT PRIMARY KEY, last_group BIGINT NOT NULL, seen_at TIMESTAMPTZ NOT NULL)",
    ),
    ("ALTER TABLE calls ADD COLUMN continuation TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE rewards ADD COLUMN call_id TEXT NOT NULL DEFAULT ''",),
    (
        "ALTER TABLE calls ADD COLUMN replica TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE calls ADD COLUMN retries TEXT NOT NULL DEFAULT ''",  # JSON; empty for none
    ),
    # JSON [[[policy version, number of tokens], ...] for each choice, ...]; empty where the call's two say all.
    ("ALTER TABLE calls ADD COLUMN versions TEXT NOT NULL DEFAULT ''",),
)


def migrate(connection: Connection, schema: str, label: str) -> None:
    """Bring `schema` up to date, all or nothing; safe when several processes start at once.

    `connection` is in autocommit mode and has `schema` for its search path. Raises `StoreError`, `psycopg.Error`.
    """
    encoding = connection.execute("SHOW server_encoding").fetchone()
    if encoding != ("UTF8",):
        raise StoreError(f"{label}: the database must have the encoding UTF8, it has {encoding and encoding[0]}.")
    if _found(connection, schema, label) == len(MIGRATIONS):
        return  # the usual case: no lock, and no right to create anything is needed
    with connection.transaction():
        # Not LOCK: there may be no current schema yet.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('outrider migration ' || %s, 0))", (schema,))
        found = _found(connection, schema, label)
        if found == 0:
            connection.execute(psycopg.sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(psycopg.sql.Identifier(schema)))
            connection.execute(
                "CREATE TABLE IF NOT EXISTS migrations (version BIGINT PRIMARY KEY, applied_at TIMESTAMPTZ NOT NULL)"
            )
        for version, statements in enumerate(MIGRATIONS[found:], start=found + 1):
            for statement in statements:
                connection.execute(statement.encode())
            connection.execute("INSERT INTO migrations VALUES (%s, now())", (version,))


def _found(connection: Connection, schema: str, label: str) -> int:
    """Number of migrations that `schema` has had."""
    # Not to_regclass: within a transaction it may remember from before the lock that there was nothing.
    if not connection.execute(
        "SELECT FROM pg_tables WHERE schemaname = %s AND tablename = 'migrations'", (schema,)
    ).fetchall():
        return 0
    (found,) = connection.execute("SELECT coalesce(max(version), 0)::int FROM migrations").fetchone() or (0,)
    if found > len(MIGRATIONS):
        raise StoreError(
            f"{label}: written by a newer Outrider (schema {found}, this one knows {len(MIGRATIONS)}). Upgrade it."
        )
    return int(found)
