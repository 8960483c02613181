"""Whole attempts go, by age and size; never those in use; room is given back; writers don't wait."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fakes.memory_store import MemoryStore
from fakes.records import make_call, make_rollout
from outrider.errors import ConfigError
from outrider.stores.prune import prune
from outrider.types import Attempt, Mode, Reward, RolloutState, Session

NOW = 1_000_000_000.0
DAY = 86400.0
NOISE = np.random.default_rng(0).bytes(100_000)  # does not compress


def add_attempt(store, name, *, age, rollout=None, state=RolloutState.SUCCEEDED, calls=2, body=b"{}"):
    """An attempt that last did something `age` seconds ago, with all that belongs to one."""
    if rollout is not None:
        store.add_rollouts([make_rollout(rollout, state=state, attempt=1)])
        store.put_attempt(Attempt(id=name, rollout_id=rollout, number=1, ended_at=NOW - age))
    store.open_session(Session(attempt_id=name, key_hash=f"hash of {name}", mode=Mode.TRAIN))
    for number in range(calls):
        started_at = NOW - age - 10 * (calls - 1 - number)
        store.append_call(make_call(f"{name}-{number}", name, started_at=started_at, response=body)).result(30)
    store.add_reward(Reward(attempt_id=name, value=1.0)).result(30)


def left(store, *names):
    """Those of `names` of which everything is there; fails where half of one is."""
    found = []
    for name in names:
        parts = {
            "calls": len(store.calls(name)),
            "rewards": len(store.rewards(name)),
            "session": store.session(f"hash of {name}") is not None,
        }
        assert len({bool(part) for part in parts.values()}) == 1, parts
        if parts["session"]:
            found.append(name)
    return found


def test_attempts_older_than_asked_go_whole(durable_store):
    add_attempt(durable_store, "r.a1", age=31 * DAY, rollout="r", body=NOISE)
    add_attempt(durable_store, "trajectory:old", age=31 * DAY)
    add_attempt(durable_store, "young", age=29 * DAY, rollout="s")
    told = []
    counts = prune(durable_store, older_than_s=30 * DAY, now=NOW, progress=lambda *numbers: told.append(numbers))
    assert (counts.attempts, counts.calls, counts.changed_meanwhile) == (2, 4, 0)
    assert counts.size_after < counts.size_before
    assert told[-1] == (2, 2)
    assert left(durable_store, "r.a1", "trajectory:old", "young") == ["young"]
    assert durable_store.attempt("r.a1") is None
    assert durable_store.attempt("young") is not None
    assert [rollout.id for rollout in durable_store.rollouts()] == ["r", "s"]  # a resumed run must not run them again
    assert durable_store.append_call(make_call("next")).result(30) == 7  # numbers are never given again


def test_an_attempt_is_as_old_as_its_newest_call(durable_store):
    add_attempt(durable_store, "a", age=31 * DAY)
    durable_store.append_call(make_call("again", "a", started_at=NOW - DAY)).result(30)
    assert prune(durable_store, older_than_s=30 * DAY, now=NOW).attempts == 0
    assert left(durable_store, "a") == ["a"]


@pytest.mark.parametrize("state", list(RolloutState))
def test_only_attempts_of_ended_rollouts_go_however_old(durable_store, state):
    add_attempt(durable_store, "r.a1", age=99 * DAY, rollout="r", state=state)
    durable_store.put_attempt(Attempt(id="r.a0", rollout_id="r", number=0, started_at=1.0))  # one before it
    counts = prune(durable_store, older_than_s=DAY, max_bytes=0, now=NOW)
    assert counts.attempts == (2 if state.ended else 0)
    assert left(durable_store, "r.a1") == ([] if state.ended else ["r.a1"])
    assert len(durable_store.attempts("r")) == (0 if state.ended else 2)


def test_an_attempt_without_a_call_goes_too(durable_store):
    durable_store.add_rollouts([make_rollout("r", state=RolloutState.FAILED, attempt=1)])
    durable_store.put_attempt(Attempt(id="r.a1", rollout_id="r", number=1, ended_at=NOW - DAY, stdout_tail="x" * 999))
    assert prune(durable_store, older_than_s=DAY / 2, now=NOW).attempts == 1
    assert durable_store.attempts("r") == []


def test_by_size_the_oldest_go_first_and_the_newest_hour_stays(durable_store):
    for number in range(8):
        add_attempt(durable_store, f"a{number}", age=(8 - number) * DAY, body=NOISE)
    add_attempt(durable_store, "now", age=60.0, body=NOISE)
    names = [*(f"a{number}" for number in range(8)), "now"]
    counts = prune(durable_store, max_bytes=1_000_000, now=NOW)
    assert counts.size_after <= 1_000_000 < counts.size_before
    kept = left(durable_store, *names)
    assert kept == names[counts.attempts :]
    assert 3 <= len(kept) <= 5
    assert prune(durable_store, max_bytes=1_000_000, now=NOW).attempts == 0
    prune(durable_store, max_bytes=0, now=NOW)
    assert left(durable_store, *names) == ["now"]
    prune(durable_store, max_bytes=0, grace_s=0.0, now=NOW)
    assert left(durable_store, *names) == []


def test_a_dry_run_removes_nothing_and_says_about_the_same(durable_store):
    for number in range(6):
        add_attempt(durable_store, f"a{number}", age=(8 - number) * DAY, body=NOISE)
    dry = prune(durable_store, older_than_s=6.5 * DAY, max_bytes=700_000, now=NOW, dry_run=True)
    assert len(left(durable_store, *(f"a{number}" for number in range(6)))) == 6
    real = prune(durable_store, older_than_s=6.5 * DAY, max_bytes=700_000, now=NOW)
    assert (dry.attempts, dry.calls, dry.size_before) == (real.attempts, real.calls, real.size_before)
    assert abs(dry.size_after - real.size_after) < 0.1 * real.size_before
    assert dry.given_back == 0


def test_an_attempt_that_got_a_call_after_it_was_listed_stays(durable_store):
    for name in ("a", "b"):
        add_attempt(durable_store, name, age=99 * DAY)
    listed = durable_store.pruner()
    candidates = listed.candidates()
    durable_store.append_call(make_call("again", "a")).result(30)
    with listed.transaction():
        assert [listed.delete(candidate) for candidate in candidates] == [False, True]
    listed.close()
    assert left(durable_store, "a", "b") == ["a"]


def test_an_attempt_whose_rollout_ran_again_after_it_was_listed_stays(durable_store):
    add_attempt(durable_store, "r.a1", age=99 * DAY, rollout="r", state=RolloutState.FAILED)
    listed = durable_store.pruner()
    (candidate,) = listed.candidates()
    assert durable_store.transition(make_rollout("r", attempt=1), expect=(RolloutState.FAILED, 1))
    with listed.transaction():
        assert not listed.delete(candidate)
    listed.close()
    assert left(durable_store, "r.a1") == ["r.a1"]


def test_an_interrupted_removal_leaves_whole_attempts(durable_store, monkeypatch):
    monkeypatch.setattr("outrider.stores.prune.BATCH_S", 1e-9)  # one attempt a transaction
    names = [f"a{number}" for number in range(4)]
    for name in names:
        add_attempt(durable_store, name, age=99 * DAY)

    def stop(done, chosen):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(durable_store, older_than_s=DAY, now=NOW, progress=stop)
    assert left(durable_store, *names) == ["a2", "a3"]
    assert prune(durable_store, older_than_s=DAY, now=NOW).attempts == 2


def test_sqlite_gives_the_room_back_and_stays_sound(sqlite_store):
    for number in range(20):
        add_attempt(sqlite_store, f"a{number}", age=(30 - number) * DAY, body=NOISE)
    counts = prune(sqlite_store, max_bytes=3_000_000, now=NOW)
    assert counts.given_back == counts.size_before - counts.size_after > 1_000_000
    assert sqlite_store.path.stat().st_size == counts.size_after <= 3_000_000
    assert sqlite_store.query("PRAGMA integrity_check") == [("ok",)]
    assert sqlite_store.query("PRAGMA freelist_count") == [(0,)]


def test_postgres_uses_the_room_again(postgres_store):
    def fill(start):
        for number in range(start, start + 10):
            add_attempt(postgres_store, f"a{number}", age=(99 - number) * DAY, body=NOISE)

    pruner = postgres_store.pruner()
    fill(0)
    once = pruner._file_size()
    for start in (10, 20, 30):
        prune(postgres_store, older_than_s=0.0, now=NOW)
        fill(start)
    assert pruner._file_size() < 1.5 * once
    pruner.close()


def test_writers_go_on_while_much_is_removed(durable_store, monkeypatch):
    monkeypatch.setattr("outrider.stores.prune.BATCH_S", 1e-9)  # one attempt a transaction
    for number in range(30):
        add_attempt(durable_store, f"a{number}", age=99 * DAY, calls=1, body=NOISE)
    steps = []
    written = threading.Semaphore(0)

    def after_some_writes(done, chosen):
        steps.append(done)
        assert written.acquire(timeout=60)

    with ThreadPoolExecutor(1) as pool:
        pruning = pool.submit(prune, durable_store, older_than_s=DAY, now=NOW, progress=after_some_writes)
        for number in itertools.count():
            durable_store.append_call(make_call(f"new{number}", "new", started_at=NOW)).result(30)
            written.release()
            if pruning.done():
                break
        pruning.result()
    assert len(steps) == 30
    assert len(durable_store.calls("new")) == number + 1 >= 30
    assert left(durable_store, *(f"a{number}" for number in range(30))) == []


def test_the_present_is_the_default(durable_store):
    durable_store.append_call(make_call("old", "old", started_at=time.time() - 2 * DAY)).result(30)
    durable_store.append_call(make_call("new", "new", started_at=time.time())).result(30)
    assert prune(durable_store, older_than_s=DAY).attempts == 1
    assert durable_store.calls("old") == []
    assert len(durable_store.calls("new")) == 1


def test_what_makes_no_sense_is_refused(sqlite_store):
    for arguments, said in (
        ({}, "how old"),
        ({"older_than_s": -1.0}, "older-than must not be negative"),
        ({"max_bytes": -1}, "max-size must not be negative"),
        ({"older_than_s": float("nan")}, "older-than"),
    ):
        with pytest.raises(ConfigError, match=said):
            prune(sqlite_store, **arguments)
    with pytest.raises(ConfigError, match="MemoryStore can't be pruned"):
        prune(MemoryStore(), older_than_s=1.0)
