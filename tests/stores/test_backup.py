"""A copy of one moment, taken beside a writer, that is a sound store itself."""

from __future__ import annotations

import sqlite3
import threading

import numpy as np
import pytest

from fakes.records import make_call, make_rollout
from outrider.errors import ConfigError, StoreError
from outrider.stores import backup
from outrider.stores.backup import backup_store
from outrider.stores.sqlite import SqliteStore
from outrider.types import Attempt, Mode, Reward, Session


def test_a_backup_beside_a_writer_is_of_one_moment_and_sound(sqlite_store, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "PAGES_AT_ONCE", 5)
    noise = np.random.default_rng(0).bytes(10_000)
    sqlite_store.add_rollouts([make_rollout("r")])
    sqlite_store.put_attempt(Attempt(id="r.a1", rollout_id="r", number=1))
    sqlite_store.open_session(Session(attempt_id="r.a1", key_hash="h", mode=Mode.TRAIN))
    sqlite_store.add_reward(Reward(attempt_id="r.a1", value=0.5)).result(30)
    sqlite_store.set_value("policy_version", "7")
    for number in range(50):
        sqlite_store.append_call(make_call(f"c{number}", "r.a1", response=noise)).result(30)
    other = SqliteStore(sqlite_store.path)  # another process's, as far as SQLite is concerned
    steps = []

    def write_on(done, total):
        steps.append((done, total))
        other.append_call(make_call(f"n{done}", "new", response=noise)).result(30)

    out = tmp_path / "copy.sqlite3"
    counts = backup_store(sqlite_store, out, progress=write_on)
    other.close()
    assert steps == sorted(set(steps))  # it never started over
    assert len(steps) > 10
    assert counts.calls == 50
    assert counts.size == out.stat().st_size
    assert len(sqlite_store.calls("new")) == len(steps)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("copy")] == ["copy.sqlite3"]
    copy = SqliteStore(out)
    assert [(call.seq, call.id, call.response) for call in copy.calls_after(0)] == [
        (number + 1, f"c{number}", noise) for number in range(50)
    ]
    assert copy.rollouts() == sqlite_store.rollouts()
    assert copy.attempts("r") == sqlite_store.attempts("r")
    assert copy.rewards("r.a1") == sqlite_store.rewards("r.a1")
    assert (copy.session("h"), copy.value("policy_version")) == (sqlite_store.session("h"), "7")
    assert copy.append_call(make_call("goes on")).result(30) == 51
    copy.close()


def test_writers_are_not_held_up_by_a_backup_that_stands_still(sqlite_store, tmp_path):
    sqlite_store.append_call(make_call("a")).result(30)
    reached, go_on = threading.Event(), threading.Event()

    def wait(done, total):
        reached.set()
        assert go_on.wait(60)

    out = tmp_path / "copy.sqlite3"
    thread = threading.Thread(target=backup_store, args=(sqlite_store, out), kwargs={"progress": wait})
    thread.start()
    assert reached.wait(60)
    assert sqlite_store.append_call(make_call("b")).result(30) == 2
    go_on.set()
    thread.join(60)
    assert out.exists()


def test_a_backup_replaces_nothing_and_a_failed_one_leaves_nothing(sqlite_store, tmp_path):
    out = tmp_path / "copy.sqlite3"
    out.write_text("precious")
    with pytest.raises(ConfigError, match=r"copy\.sqlite3: exists"):
        backup_store(sqlite_store, out)
    assert out.read_text() == "precious"
    with pytest.raises(StoreError, match="the backup failed"):
        backup_store(sqlite_store, tmp_path / "nowhere" / "copy.sqlite3")

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup_store(sqlite_store, tmp_path / "other.sqlite3", progress=stop)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("other")] == []


def test_a_damaged_store_makes_no_backup(sqlite_store, tmp_path):
    for number in range(200):
        sqlite_store.append_call(make_call(f"c{number}")).result(30)
    sqlite_store.close()
    with sqlite_store.path.open("r+b") as file:
        file.seek(-3 * 4096, 2)
        file.write(b"\xff" * 4096)
    store = SqliteStore(sqlite_store.path)
    with pytest.raises(StoreError, match=r"the copy is damaged|the backup failed"):
        backup_store(store, tmp_path / "copy.sqlite3")
    assert not (tmp_path / "copy.sqlite3").exists()
    store.close()


def test_postgres_is_referred_to_its_own_tool(postgres_store, tmp_path):
    with pytest.raises(ConfigError, match="pg_dump"):
        backup_store(postgres_store, tmp_path / "copy")


def test_the_copy_needs_no_wal_file(sqlite_store, tmp_path):
    sqlite_store.append_call(make_call("a")).result(30)
    backup_store(sqlite_store, tmp_path / "copy.sqlite3")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "copy.sqlite3").rename(moved / "x.sqlite3")
    with sqlite3.connect(moved / "x.sqlite3") as connection:
        assert connection.execute("SELECT count(*) FROM calls").fetchone() == (1,)
    connection.close()
