"""Earlier answers that an agent names instead of sending them again, found in the store.

A dialect remembers the answers of its own process. What it doesn't know was given before a restart, or by another
gateway on the same store, and is made again of the recorded calls.

An answer is named after its call. A call's id holds a random part and a digest of it with the caller: whoever names
another caller's answer names an id that this caller's calls can't have.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import TypeGuard

from outrider.errors import RequestError
from outrider.gateway.sse import EventSplitter
from outrider.protocols import Store
from outrider.types import Call, CallState
from outrider.wire import Dialect, Recaller, WireRequest

LONGEST = 1000  # answers that follow each other; longer conversations start anew
_HALF = 24  # hexadecimal digits: 96 bits each for the random part and the digest


def new_call_id(owner: str) -> str:
    random = secrets.token_hex(_HALF // 2)
    return random + _digest(owner, random)


def is_own_call(owner: str, call_id: str) -> bool:
    return hmac.compare_digest(call_id[_HALF:].encode(), _digest(owner, call_id[:_HALF]).encode())


def _digest(owner: str, random: str) -> str:
    return hashlib.sha256(f"{random}\0{owner}".encode()).hexdigest()[:_HALF]


class Recall:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._recallers: dict[type[Dialect], bool] = {}

    def _recalls(self, dialect: Dialect) -> TypeGuard[Recaller]:
        """To ask a protocol takes a good part of the time that is spent on a call."""
        kind = type(dialect)
        found = self._recallers.get(kind)
        if found is None:
            found = self._recallers[kind] = isinstance(dialect, Recaller)
        return found

    async def earlier(self, dialect: Dialect, request: WireRequest, owner: str) -> None:
        """Let `dialect` know the answers that `request` names, if they are `owner`'s. Raises `StoreError`."""
        if not self._recalls(dialect):
            return
        wanted = [named for named in dialect.names(request) if not dialect.knows(owner, named)]
        if wanted:
            await asyncio.to_thread(self._read, dialect, wanted, owner)

    async def trajectory(self, dialect: Dialect, request: WireRequest, owner: str, known: Mapping[str, str]) -> str:
        """Where the answers belong that `request` names; empty where it names none of `owner`'s. `known` has the
        trajectories of recent calls by their ids. Raises `StoreError`."""
        for named in dialect.names(request) if self._recalls(dialect) else ():
            if not is_own_call(owner, named):
                continue
            if named in known:
                return known[named]
            call = await asyncio.to_thread(self._store.call, named)
            if call is not None:
                return call.attempt_id
        return ""

    def _read(self, dialect: Recaller, wanted: list[str], owner: str) -> None:
        """A call's request may name earlier ones, and can be read once these are known: so the first is read first."""
        found: dict[str, tuple[WireRequest, Call] | None] = {}
        pending = list(reversed(wanted))
        while pending:
            named = pending[-1]
            if named not in found:
                found[named] = self._call(dialect, named, owner) if len(found) < LONGEST else None
                one = found[named]
                earlier = dialect.names(one[0]) if one is not None else ()
                pending += [name for name in earlier if name not in found and not dialect.knows(owner, name)]
                continue
            pending.pop()
            one = found[named]
            if one is not None and not dialect.knows(owner, named):
                _read_again(dialect, *one, owner)

    def _call(self, dialect: Recaller, named: str, owner: str) -> tuple[WireRequest, Call] | None:
        call = self._store.call(named) if is_own_call(owner, named) else None
        if call is None or call.state is not CallState.COMPLETE or call.dialect != dialect.name:
            return None
        try:
            return dialect.parse(call.request), call
        except RequestError:
            return None  # what was taken out before storage has left no request


def _read_again(dialect: Dialect, request: WireRequest, call: Call, owner: str) -> None:
    try:
        prepared = dialect.prepare(request, overrides={}, tokens=False, owner=owner, call_id=call.id)
    except RequestError:
        return  # it names what is not known
    reader = dialect.reader(prepared)
    if call.response[:100].lstrip().startswith(b"{"):
        reader.body(call.response)
        return
    splitter = EventSplitter()
    for event in [*splitter.feed(call.response), *splitter.end()]:
        reader.event(event)
    reader.end()
