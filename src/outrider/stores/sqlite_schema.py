"""Tables of the SQLite store, as an append-only list of migrations: never edit one that was released, add one."""

from __future__ import annotations

import sqlite3
import time

from outrider.errors import StoreError

# `calls.seq` is given inside BEGIN IMMEDIATE, so its order is the order of commits and a rolled-back number is given
# again: a follower sees no gap. AUTOINCREMENT keeps numbers from being used twice when the newest calls are pruned.
# Bodies are zstd frames. `prompt_ids`, `token_ids` are little-endian int32, `logprobs` little-endian float32;
# `choices` is JSON [[index, number of ids, number of log-probs, finish reason], ...] and cuts the two blobs up.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE calls (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            attempt_id TEXT NOT NULL,
            dialect TEXT NOT NULL,
            model TEXT NOT NULL,
            state TEXT NOT NULL,
            status INTEGER NOT NULL,
            streamed INTEGER NOT NULL,
            prompt_tokens INTEGER,
            completion_tokens INTEGER,
            fidelity TEXT NOT NULL,
            fidelity_reason TEXT NOT NULL,
            sampling TEXT NOT NULL,
            version_start INTEGER,
            version_end INTEGER,
            started_at REAL NOT NULL,
            duration_s REAL NOT NULL,
            first_token_s REAL,
            error TEXT NOT NULL,
            choices TEXT NOT NULL,
            prompt_ids BLOB,
            token_ids BLOB NOT NULL,
            logprobs BLOB NOT NULL,
            request BLOB NOT NULL,
            response BLOB NOT NULL
        )""",
        "CREATE INDEX calls_by_attempt ON calls (attempt_id, seq)",
        """CREATE TABLE rewards (
            seq INTEGER PRIMARY KEY AUTOINCREMENT,
            attempt_id TEXT NOT NULL,
            name TEXT NOT NULL,
            value REAL NOT NULL,
            reason TEXT NOT NULL,
            parts TEXT NOT NULL,
            source TEXT NOT NULL,
            created_at REAL NOT NULL
        )""",
        "CREATE INDEX rewards_by_attempt ON rewards (attempt_id, seq)",
        """CREATE TABLE sessions (
            key_hash TEXT PRIMARY KEY,
            attempt_id TEXT NOT NULL,
            mode TEXT NOT NULL,
            sampling TEXT NOT NULL,
            allow_feedback INTEGER NOT NULL,
            expires_at REAL,
            sealed INTEGER NOT NULL
        ) WITHOUT ROWID""",
        "CREATE INDEX sessions_by_attempt ON sessions (attempt_id)",
        """CREATE TABLE rollouts (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            task_id TEXT NOT NULL,
            task_fields TEXT NOT NULL,
            group_id TEXT NOT NULL,
            split TEXT NOT NULL,
            step INTEGER NOT NULL,
            mode TEXT NOT NULL,
            sampling TEXT NOT NULL,
            state TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            reward REAL,
            failure TEXT NOT NULL,
            reason TEXT NOT NULL
        )""",
        "CREATE INDEX rollouts_by_use ON rollouts (split, step, state)",
        """CREATE TABLE attempts (
            id TEXT PRIMARY KEY,
            rollout_id TEXT NOT NULL,
            number INTEGER NOT NULL,
            started_at REAL NOT NULL,
            ended_at REAL,
            exit_code INTEGER,
            signal INTEGER,
            timed_out INTEGER NOT NULL,
            failure TEXT NOT NULL,
            reason TEXT NOT NULL,
            stdout_tail TEXT NOT NULL,
            stderr_tail TEXT NOT NULL
        )""",
        "CREATE INDEX attempts_by_rollout ON attempts (rollout_id, number)",
        'CREATE TABLE "values" (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID',
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


def migrate(connection: sqlite3.Connection, label: str) -> None:
    """Bring the schema up to date, all or nothing; safe when several processes open a new file at once."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY, applied_at REAL NOT NULL)")
    (found,) = connection.execute("SELECT coalesce(max(version), 0) FROM migrations").fetchone()
    if found > len(MIGRATIONS):
        connection.execute("ROLLBACK")
        raise StoreError(
            f"{label}: written by a newer Outrider (schema {found}, this one knows {len(MIGRATIONS)}). Upgrade it."
        )
    for version, statements in enumerate(MIGRATIONS[found:], start=found + 1):
        for statement in statements:
            connection.execute(statement)
        connection.execute("INSERT INTO migrations VALUES (?, ?)", (version, time.time()))
    connection.execute("COMMIT")
