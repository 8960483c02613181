"""Scores that come over HTTP: an agent's feedback on its own attempt, a grader's reward for any; also after the end."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from outrider.errors import RequestError
from outrider.gateway.telemetry.counters import Counters
from outrider.protocols import Store
from outrider.types import Json, Reward, Session

FINAL = "final"  # the name of the reward that counts
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,100}")


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    value: float
    name: str = ""
    reason: Annotated[str, Meta(max_length=20_000)] = ""
    source: Annotated[str, Meta(max_length=200)] = ""
    parts: Annotated[dict[str, float], Meta(max_length=100)] = {}
    call_id: Annotated[str, Meta(max_length=200)] = ""


class Feedback:
    """Checks what is given and stores it. `low` and `high` bound every value, `agent_final` is an option's meaning."""

    def __init__(self, store: Store, counters: Counters, *, low: float, high: float, agent_final: bool) -> None:
        self._store = store
        self._counters = counters
        self._low = low
        self._high = high
        self._agent_final = agent_final

    async def from_agent(self, session: Session, body: bytes) -> Json:
        """Raises `RequestError`."""
        given = self._parse(body)
        name = given.name or "feedback"
        if name == FINAL and not self._agent_final:
            raise RequestError(
                "name: an agent may not give its own final reward here.", status=403, code="final_not_allowed"
            )
        # Said by the agent, whomever it names: nobody should take it for a grader's.
        return await self._add(session.attempt_id, name, given, source=f"agent:{given.source}".rstrip(":"))

    async def from_grader(self, attempt_id: str, role: str, body: bytes) -> Json:
        """Raises `RequestError`."""
        given = self._parse(body)
        if not await asyncio.to_thread(self._exists, attempt_id):
            raise RequestError(f"There is no attempt {attempt_id!r}.", status=404, code="unknown_attempt")
        return await self._add(attempt_id, given.name or FINAL, given, source=given.source or role)

    def _exists(self, attempt_id: str) -> bool:
        known = self._store.attempt(attempt_id) is not None or bool(self._store.sessions(attempt_id))
        return known or bool(self._store.calls(attempt_id))

    def _has_call(self, attempt_id: str, call_id: str) -> bool:
        call = self._store.call(call_id)
        return call is not None and call.attempt_id == attempt_id

    def _parse(self, body: bytes) -> _Given:
        try:
            # Python's parser takes NaN and Infinity, so that they can be named instead of "malformed".
            given = msgspec.convert(json.loads(body), _Given)
            msgspec.json.encode(given)  # half a surrogate pair can't be written down again
        except (ValueError, RecursionError) as error:  # msgspec's errors and bad UTF-8 are ValueErrors too
            raise RequestError(f"The feedback is not valid: {plain(error)}.") from None
        for name, value in {
            "value": given.value,
            **{f"parts.{name}": part for name, part in given.parts.items()},
        }.items():
            if not math.isfinite(value):
                raise RequestError(f"{name}: must be a finite number, not {value}.", code="not_finite", param=name)
        if not self._low <= given.value <= self._high:
            raise RequestError(
                f"value: {given.value!r} lies outside {self._low!r} to {self._high!r}.",
                code="out_of_range",
                param="value",
            )
        if given.name and not _NAME.fullmatch(given.name):
            raise RequestError("name: up to 100 of A-Z a-z 0-9 . _ : / - are allowed.", param="name")
        return given

    async def _add(self, attempt_id: str, name: str, given: _Given, *, source: str) -> Json:
        reward = Reward(
            attempt_id=attempt_id,
            value=given.value,
            name=name,
            reason=given.reason,
            parts=given.parts,
            source=source,
            created_at=time.time(),
            call_id=given.call_id,
        )
        if given.call_id and not await asyncio.to_thread(self._has_call, attempt_id, given.call_id):
            raise RequestError(
                f"call_id: attempt {attempt_id!r} has no call {given.call_id!r}.", status=404, code="unknown_call"
            )
        seq = await asyncio.wrap_future(self._store.add_reward(reward))
        self._counters.rewarded(name, source.partition(":")[0])
        return {"attempt_id": attempt_id, "name": name, "value": given.value, "source": source, "seq": seq}


def as_json(reward: Reward) -> Json:
    found: Any = msgspec.to_builtins(reward)
    return dict(found)


def plain(error: Exception) -> str:
    """msgspec's ``Expected `float`, got `str` - at `$.value`` as ``value: expected float, got str``."""
    text, _, path = str(error).replace("`", "").rstrip(".").partition(" - at $")
    return f"{path.removeprefix('.')}: {text[:1].lower()}{text[1:]}" if path else text
