"""What gateways on one store tell each other, without their processes."""

from __future__ import annotations

import asyncio
import time

import pytest

from fakes.memory_store import MemoryStore
from outrider.errors import StoreError
from outrider.gateway import fleet
from outrider.gateway.admission import Admission, Refused
from outrider.gateway.fleet import Fleet


class Anybody:
    """Stands for an exchange whose client waits."""

    async def unless_gone(self, waiting):
        await waiting


def member(store, wait_s=30.0):
    admission = Admission(version=None, wait_s=wait_s)
    found = Fleet(store, admission)
    admission.confirm = found.confirm
    return found, admission


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(fleet, "POLL_S", 0.01)
    monkeypatch.setattr(fleet, "BEAT_S", 0.02)
    monkeypatch.setattr(fleet, "SILENT_S", 30.0)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_pause_waits_for_calls_elsewhere_and_a_resume_brings_the_version():
    store = MemoryStore()
    one, one_admission = member(store)
    other, other_admission = member(store)
    for each in (one, other):
        each.join()
    await other_admission.enter(Anybody())
    assert await one.pause(0.2) == 1
    assert one_admission.paused
    assert other_admission.paused
    pausing = asyncio.create_task(one.pause(30))
    await asyncio.sleep(0.1)
    assert not pausing.done()
    other_admission.leave()
    assert await pausing == 0
    await other.resume(5)
    await until(lambda: not one_admission.paused)
    assert (one_admission.version, other_admission.version, store.value("policy_version")) == (5, 5, "5")
    for each in (one, other):
        await each.leave()
    assert [text for text in store.values(fleet.MEMBERS).values() if text] == []


async def test_one_that_stood_still_looks_before_it_admits_a_call(monkeypatch):
    monkeypatch.setattr(fleet, "SILENT_S", 1.0)
    store = MemoryStore()
    one, _ = member(store)
    still, admission = member(store, wait_s=0.05)
    one.join()
    still.join()
    await until(lambda: len(store.values(fleet.MEMBERS)) == 2)
    still._task.cancel()  # as a process that gets no time
    assert await one.pause(30) == 0
    assert not admission.paused
    with pytest.raises(Refused):
        await admission.enter(Anybody())
    assert admission.paused
    await one.leave()


async def test_one_that_is_gone_is_waited_for_once(monkeypatch):
    store = MemoryStore()
    one, _ = member(store)
    gone, _ = member(store)
    one.join()
    gone.join()
    await until(lambda: len(store.values(fleet.MEMBERS)) == 2)
    gone._task.cancel()
    assert await one.pause(0.1) == 1  # nobody can say that it has none
    monkeypatch.setattr(fleet, "SILENT_S", 1.0)
    assert await one.pause(30) == 0
    assert store.values(fleet.MEMBERS)[gone._name] == ""
    assert await one.pause(0.0) == 0
    await one.leave()


@pytest.mark.parametrize(("age_s", "held"), [(60.0, True), (fleet.FORGOTTEN_S + 60, False)])
async def test_one_that_starts_takes_up_a_pause_unless_it_was_forgotten(monkeypatch, age_s, held):
    store = MemoryStore()
    one, _ = member(store)
    told = time.time() - age_s
    with monkeypatch.context() as before:
        before.setattr(fleet.time, "time", lambda: told)
        await one.pause(0.0)
    late, admission = member(store, wait_s=0.05)
    if held:
        with pytest.raises(Refused):
            await admission.enter(Anybody())
    else:
        await admission.enter(Anybody())
    await one.pause(0.0)  # a new one counts
    await late._look()
    assert admission.paused


async def test_a_store_that_fails_pauses_nobody(monkeypatch):
    store = MemoryStore()
    one, admission = member(store)

    def fail(key, value):
        raise StoreError("away")

    monkeypatch.setattr(store, "set_value", fail)
    with pytest.raises(StoreError):
        await one.pause(1)
    with pytest.raises(StoreError):
        await one.resume(1)
    assert (admission.paused, admission.version) == (False, None)
    monkeypatch.undo()
    other, _ = member(store)
    await other.pause(0.0)  # what came to nothing is no excuse to miss this
    one.join()
    await until(lambda: admission.paused)
    await one.leave()


async def test_it_goes_on_after_the_store_was_away(monkeypatch):
    store = MemoryStore()
    one, _ = member(store)
    other, admission = member(store)
    read = store.value

    def fail(key):
        raise StoreError("away")

    monkeypatch.setattr(store, "value", fail)
    other.join()
    await asyncio.sleep(0.05)
    monkeypatch.setattr(store, "value", read)
    await one.pause(0.0)
    await until(lambda: admission.paused)
    await other.leave()
