"""Several gateways on one store: a pause, or new weights, reach all of them, whichever was told.

What was told last stands in the store (``fleet:control``), and each gateway looks there several times a second. While a
pause is on, each writes down how many calls it still has in flight (``fleet:member:ID``), so that the one that was told
can wait for all. A gateway that was killed falls silent, and is no longer waited for after `SILENT_S`.

A gateway that starts during a pause begins paused, unless whoever paused has forgotten about it (`FORGOTTEN_S`). A new
policy version counts from the resume that brought it: a gateway that has not seen it yet still holds its calls back, so
no call is recorded under a version it didn't have.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

import msgspec

from outrider.errors import StoreError
from outrider.gateway.admission import VERSION_KEY, Admission
from outrider.protocols import Store

log = logging.getLogger("outrider.gateway")

POLL_S = 0.2
BEAT_S = 1.0  # between two signs of life
SILENT_S = 6.0  # a member without one is taken to be gone
FORGOTTEN_S = 3600.0  # a pause this old is not taken up by a gateway that starts
CONTROL = "fleet:control"
MEMBERS = "fleet:member:"


class _Control(msgspec.Struct):
    epoch: int = 0
    """Grows with each pause and resume."""
    paused: bool = False
    version: int | None = None
    at: float = 0.0
    """When it was told, by the clock of the gateway that was told."""


class _Member(msgspec.Struct):
    beat: int = 0
    """Grows while it lives: clocks of several machines need not agree."""
    epoch: int = 0
    """Of the control that it has seen."""
    in_flight: int = 0


class Fleet:
    """Lives on one event loop, on which it reads and writes a `Store` through threads."""

    def __init__(self, store: Store, admission: Admission) -> None:
        self._store = store
        self._admission = admission
        self._name = MEMBERS + secrets.token_hex(8)
        self._seen = _Control()
        self._beat = 0
        self._written = _Member()
        self._beaten_at = self._looked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def join(self) -> None:
        """Look after the store from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def leave(self) -> None:
        """Be waited for no more."""
        if self._task is not None:
            self._task.cancel()
            try:
                await asyncio.to_thread(self._store.set_value, self._name, "")
            except StoreError as error:
                log.warning("the store was not told that this gateway ends: %s", error)

    async def pause(self, timeout_s: float) -> int:
        """Hold new calls back everywhere and wait until those in flight have ended; returns how many have not.

        Raises `StoreError`.
        """
        deadline = time.monotonic() + timeout_s
        await self._tell(paused=True, version=self._admission.version)
        here = asyncio.ensure_future(self._admission.pause(timeout_s))
        elsewhere = await self._others(deadline)
        return await here + elsewhere

    async def resume(self, version: int | None) -> None:
        """Admit calls again everywhere, recorded under `version`. Raises `StoreError`."""
        if version is not None:
            await asyncio.to_thread(self._store.set_value, VERSION_KEY, str(version))
        await self._tell(paused=False, version=version)
        self._admission.admit(version)

    async def _tell(self, *, paused: bool, version: int | None) -> None:
        known = await asyncio.to_thread(self._read)
        control = _Control(epoch=max(known.epoch, self._seen.epoch) + 1, paused=paused, version=version, at=time.time())
        await asyncio.to_thread(self._store.set_value, CONTROL, msgspec.json.encode(control).decode())
        self._seen = control

    def _read(self) -> _Control:
        text = self._store.value(CONTROL)
        return msgspec.json.decode(text, type=_Control) if text else _Control()

    async def confirm(self) -> None:
        """Look before a call is admitted, where the last look was so long ago that others may think us gone."""
        if time.monotonic() - self._looked_at > SILENT_S / 2:
            await self._look()

    # -- as a member -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except StoreError as error:
                log.warning("the store did not tell of the other gateways: %s", error)
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        control = await asyncio.to_thread(self._read)
        if control.epoch > self._seen.epoch:
            starts, self._seen = self._seen.epoch == 0, control
            if control.paused and starts and time.time() - control.at > FORGOTTEN_S:
                log.warning("the store holds a pause that is over an hour old; it is not taken up")
            elif control.paused:
                self._admission.hold()
            else:
                self._admission.admit(control.version)
        now = self._looked_at = time.monotonic()
        member = _Member(epoch=self._seen.epoch, in_flight=self._admission.in_flight if self._seen.paused else 0)
        told = (self._written.epoch, self._written.in_flight) == (member.epoch, member.in_flight)
        if told and now - self._beaten_at < BEAT_S:
            return
        self._beat += 1
        member.beat = self._beat
        self._written, self._beaten_at = member, now
        await asyncio.to_thread(self._store.set_value, self._name, msgspec.json.encode(member).decode())

    # -- as the one that was told ----------------------------------------------------------------------------------

    async def _others(self, deadline: float) -> int:
        """Calls in flight at other gateways, once there are none or it is late. Those that are gone are forgotten."""
        beats: dict[str, tuple[int, float]] = {}
        while True:
            members = await asyncio.to_thread(self._members)
            now = time.monotonic()
            busy, waiting = 0, False
            for name, member in members.items():
                beat, since = beats.setdefault(name, (member.beat, now))
                if beat != member.beat:
                    beats[name] = (member.beat, now)
                elif now - since > SILENT_S:
                    await asyncio.to_thread(self._store.set_value, name, "")
                    continue
                if member.epoch < self._seen.epoch:
                    waiting = True  # it may still admit calls
                else:
                    busy += member.in_flight
            if not waiting and not busy:
                return 0
            if now > deadline:
                return max(busy, 1)
            await asyncio.sleep(POLL_S / 2)

    def _members(self) -> dict[str, _Member]:
        found = self._store.values(MEMBERS)
        return {
            name: msgspec.json.decode(text, type=_Member) for name, text in found.items() if text and name != self._name
        }
