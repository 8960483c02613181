"""Remove old attempts from a store, by age and by size, beside running gateways.

An attempt goes whole or not at all: its calls, rewards, session and the record of its process. Rollouts stay, with
their state and reward: they are small, and a run that is resumed would execute a rollout anew that it doesn't find. No
attempt goes whose rollout is queued or running, nor one that did something within `grace_s`, since a trainer may not
have read it yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from outrider.errors import ConfigError
from outrider.protocols import Store
from outrider.types import RolloutState

# Writers wait while attempts are being removed: so long at most (plus one attempt), and then they get twice that time.
BATCH_S = 0.02
PAUSE = 2.0


class Candidate(NamedTuple):
    """An attempt that may be removed, as it was when it was listed."""

    attempt_id: str
    last_seq: int
    """Number of its newest call, 0 if it has none."""
    last_at: float
    """When it last did something, seconds since the epoch."""
    calls: int
    size: int
    """About how many bytes it takes."""


class Pruner(Protocol):
    """A store's own way to do it, over a connection of its own."""

    def candidates(self) -> list[Candidate]:
        """Attempts of no rollout that is queued or running, oldest first."""

    def size(self) -> int:
        """Bytes that the data in the store takes, without room that is free already."""

    def transaction(self) -> AbstractContextManager[None]:
        """Keeps writers out, so a short one."""

    def delete(self, candidate: Candidate) -> bool:
        """Within a transaction. False, and nothing done, where the attempt has changed since it was listed."""

    def give_back(self) -> int:
        """Return free room to the file system as far as the store can beside writers; returns bytes."""

    def close(self) -> None: ...


@runtime_checkable
class Prunable(Protocol):
    def pruner(self) -> Pruner: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCounts:
    """What was removed, or with `dry_run` what would be."""

    attempts: int
    calls: int
    size_before: int
    """Bytes of data, see `Pruner.size`."""
    size_after: int
    """Estimated with `dry_run`. Above the `max_bytes` asked for where the rest is too young or in use."""
    given_back: int
    """Bytes that went back to the file system."""
    changed_meanwhile: int
    """Attempts left alone because a call came, or their rollout ran again, after they were listed."""


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    max_bytes: int | None = None,
    grace_s: float = 3600.0,
    dry_run: bool = False,
    now: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PruneCounts:
    """Remove attempts that last did something more than `older_than_s` ago; then, while the data takes more than
    `max_bytes`, the oldest of the others. Give one or both.

    `now` is for tests. `progress` is called with the number of attempts done and chosen. Interrupting it does no harm.
    Raises `ConfigError`, `StoreError`.
    """
    if older_than_s is None and max_bytes is None:
        raise ConfigError("prune: say how old (--older-than) or how large (--max-size).")
    for name, value in (("older-than", older_than_s), ("max-size", max_bytes), ("grace", grace_s)):
        if value is not None and not value >= 0:
            raise ConfigError(f"prune: {name} must not be negative, it is {value}.")
    if not isinstance(store, Prunable):
        raise ConfigError(f"prune: a {type(store).__name__} can't be pruned.")
    now = time.time() if now is None else now
    pruner = store.pruner()
    try:
        rest = deque(one for one in pruner.candidates() if one.last_at <= now - grace_s)
        before = size = pruner.size()
        chosen = _older(rest, now - older_than_s) if older_than_s is not None else []
        if dry_run:
            size -= sum(one.size for one in chosen)
            chosen += _too_much(rest, size, max_bytes)
            after = before - sum(one.size for one in chosen)
            return _counts(chosen, [], before, max(after, 0), 0)
        removed, changed = _remove(pruner, chosen, progress)
        # Sizes of attempts are estimates, so look again.
        while more := _too_much(rest, pruner.size(), max_bytes):
            one_more, changed_too = _remove(pruner, more, progress)
            removed += one_more
            changed += changed_too
        given_back = pruner.give_back() if removed else 0
        return _counts(removed, changed, before, pruner.size(), given_back)
    finally:
        pruner.close()


def _older(rest: deque[Candidate], than: float) -> list[Candidate]:
    """Take those from the left of `rest` that ended before `than`."""
    taken = []
    while rest and rest[0].last_at < than:
        taken.append(rest.popleft())
    return taken


def _too_much(rest: deque[Candidate], size: int, max_bytes: int | None) -> list[Candidate]:
    """Take the oldest from `rest`, until the rest of `size` bytes would fit into `max_bytes`."""
    taken = []
    while max_bytes is not None and rest and size > max_bytes:
        taken.append(rest.popleft())
        size -= taken[-1].size
    return taken


def _remove(
    pruner: Pruner, chosen: Sequence[Candidate], progress: Callable[[int, int], None] | None
) -> tuple[list[Candidate], list[Candidate]]:
    """Returns those that were removed and those that had changed."""
    removed: list[Candidate] = []
    changed: list[Candidate] = []
    waiting = deque(chosen)
    while waiting:
        with pruner.transaction():
            began = time.monotonic()
            ends = False
            while waiting and not ends:
                candidate = waiting.popleft()
                (removed if pruner.delete(candidate) else changed).append(candidate)
                ends = time.monotonic() - began >= BATCH_S
        if progress is not None:
            progress(len(removed) + len(changed), len(chosen))
        if waiting:
            time.sleep(PAUSE * (time.monotonic() - began))
    return removed, changed


def _counts(
    removed: Sequence[Candidate], changed: Sequence[Candidate], before: int, after: int, given_back: int
) -> PruneCounts:
    return PruneCounts(
        attempts=len(removed),
        calls=sum(one.calls for one in removed),
        size_before=before,
        size_after=after,
        given_back=given_back,
        changed_meanwhile=len(changed),
    )


# -- what the SQL of both stores shares --------------------------------------------------------------------------------

LIVE = f"('{RolloutState.QUEUED.value}', '{RolloutState.RUNNING.value}')"
ROW_BYTES = 500  # of a call, beside its bodies and tokens


def candidates_sql(*, greatest: str, size: str, in_use: bool = False) -> str:
    """Columns as in `Candidate`; with `in_use` also attempts whose rollout goes on.

    `greatest` and `size` name the functions for the larger of two numbers and for a column's bytes.
    """
    blobs = " + ".join(
        f"coalesce({size}({column}), 0)" for column in ("prompt_ids", "token_ids", "logprobs", "request", "response")
    )
    return f"""
        WITH used AS (
            SELECT attempt_id AS id, max(seq) AS last_seq, max(started_at + duration_s) AS last_at, count(*) AS calls,
                CAST(sum({blobs} + {ROW_BYTES}) AS BIGINT) AS size
            FROM calls GROUP BY attempt_id
        ), ids AS (SELECT id FROM used UNION SELECT id FROM attempts)
        SELECT ids.id, coalesce(last_seq, 0),
            {greatest}(coalesce(last_at, 0.0), coalesce(ended_at, started_at, 0.0)) AS at, coalesce(calls, 0),
            coalesce(size, 0) + coalesce({size}(stdout_tail) + {size}(stderr_tail) + {ROW_BYTES}, 0)
        FROM ids LEFT JOIN used ON used.id = ids.id LEFT JOIN attempts ON attempts.id = ids.id
            LEFT JOIN rollouts ON rollouts.id = attempts.rollout_id
        {"" if in_use else f"WHERE rollouts.state IS NULL OR rollouts.state NOT IN {LIVE}"}
        ORDER BY at, ids.id"""


# {0} stands for the store's mark of a parameter: attempt id, attempt id and last number here, an id in each delete.
UNCHANGED = f"""
    SELECT 1 WHERE NOT EXISTS (
        SELECT 1 FROM attempts JOIN rollouts ON rollouts.id = attempts.rollout_id
        WHERE attempts.id = {{0}} AND rollouts.state IN {LIVE}
    ) AND coalesce((SELECT max(seq) FROM calls WHERE attempt_id = {{0}}), 0) = {{0}}"""
DELETES = (
    "DELETE FROM calls WHERE attempt_id = {0}",
    "DELETE FROM rewards WHERE attempt_id = {0}",
    "DELETE FROM sessions WHERE attempt_id = {0}",
    "DELETE FROM attempts WHERE id = {0}",
)
