"""Attempts that somebody else starts: opened, ended and looked at over HTTP.

A trainer that runs attempts itself opens and seals them in the store. This is for traffic that starts elsewhere, such
as a service that asks for a key for each of its tasks.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from outrider.errors import RequestError
from outrider.gateway.sessions import TRAJECTORY_PREFIX
from outrider.keys import hash_key, new_key
from outrider.protocols import Store
from outrider.types import Json, Mode, Session

YEAR_S = 366 * 86_400
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,200}")


class OpenAttempt(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /admin/attempts``."""

    id: str = ""
    mode: Mode = Mode.TRAIN
    sampling: dict[str, Any] = {}
    allow_feedback: bool = False
    expires_s: Annotated[float, Meta(gt=0, le=YEAR_S)] | None = None


class Attempts:
    """Every method raises `RequestError` and `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def open(self, asked: OpenAttempt) -> Json:
        """The key is in this answer and nowhere else."""
        attempt_id = asked.id or uuid.uuid4().hex
        if not _ID.fullmatch(attempt_id) or attempt_id.startswith(TRAJECTORY_PREFIX):
            raise RequestError(
                f"id: up to 200 of A-Z a-z 0-9 . _ : / - are allowed, not beginning with {TRAJECTORY_PREFIX}",
                param="id",
            )
        key = new_key()
        session = Session(
            attempt_id=attempt_id,
            key_hash=hash_key(key),
            mode=asked.mode,
            sampling=asked.sampling,
            allow_feedback=asked.allow_feedback,
            expires_at=None if asked.expires_s is None else time.time() + asked.expires_s,
        )
        await asyncio.to_thread(self._open, session)
        paths = {"openai": f"/s/{key}/v1", "anthropic": f"/s/{key}"}
        return {"attempt_id": attempt_id, "key": key, "base_paths": paths, **_told(session)}

    def _open(self, session: Session) -> None:
        if self._exists(session.attempt_id):
            raise RequestError(
                f"There is an attempt {session.attempt_id!r} already; another try is another attempt.",
                status=409,
                code="attempt_exists",
                param="id",
            )
        self._store.open_session(session)

    async def seal(self, attempt_id: str) -> Json:
        """End it: its key opens nothing any more. Sealing twice is harmless."""
        if not await asyncio.to_thread(self._store.sessions, attempt_id):
            raise _unknown(attempt_id)
        await asyncio.to_thread(self._store.seal, attempt_id)
        return {"attempt_id": attempt_id, "sealed": True}

    async def state(self, attempt_id: str) -> Json:
        return await asyncio.to_thread(self._state, attempt_id)

    def _state(self, attempt_id: str) -> Json:
        sessions = self._store.sessions(attempt_id)
        calls = self._store.calls(attempt_id)
        if not sessions and not calls:
            raise _unknown(attempt_id)
        attempt = self._store.attempt(attempt_id)
        return {
            "attempt_id": attempt_id,
            "rollout_id": attempt.rollout_id if attempt is not None else None,
            "sealed": bool(sessions) and all(session.sealed for session in sessions),
            "keys": [_told(session) for session in sessions],
            "calls": len(calls),
            "states": dict(Counter(call.state for call in calls)),
            "fidelity": dict(Counter(call.fidelity for call in calls)),
            "rewards": {reward.name: reward.value for reward in self._store.rewards(attempt_id)},
        }

    def _exists(self, attempt_id: str) -> bool:
        return bool(self._store.sessions(attempt_id)) or self._store.attempt(attempt_id) is not None


def _told(session: Session) -> Json:
    return {
        "mode": session.mode,
        "sampling": session.sampling,
        "allow_feedback": session.allow_feedback,
        "expires_at": session.expires_at,
        "sealed": session.sealed,
    }


def _unknown(attempt_id: str) -> RequestError:
    return RequestError(f"There is no attempt {attempt_id!r}.", status=404, code="unknown_attempt")
