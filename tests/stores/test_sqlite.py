"""What is SQLite's own: several processes, migrations, a disk that fails."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fakes.records import make_call, make_rollout
from outrider.errors import StoreBusy, StoreError
from outrider.stores.sqlite import SqliteStore
from outrider.stores.sqlite_schema import MIGRATIONS
from outrider.stores.write_queue import LONE_GROUPS
from outrider.types import Mode, Session

APPENDER = """
import sys, threading
from fakes.records import make_call
from outrider.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
def append(worker):
    for number in range(20):
        call = make_call(f"p{sys.argv[2]}-{worker}-{number}", f"attempt-{worker % 4}")
        print(store.append_call(call).result(120), flush=True)
threads = [threading.Thread(target=append, args=(worker,)) for worker in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
store.close()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store.sqlite3"


def run_python(code, *args, **options):
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=environment, text=True, **options)


def test_D01_32_appenders_in_two_processes_make_no_error_no_gap_no_duplicate(path):
    # Both open a file that does not exist yet, at the same time.
    processes = [run_python(APPENDER, path, number, stdout=subprocess.PIPE) for number in range(2)]
    acknowledged = [int(line) for process in processes for line in process.communicate(timeout=120)[0].split()]
    assert [process.returncode for process in processes] == [0, 0]
    store = SqliteStore(path)
    committed = store.calls_after(0, limit=10_000)
    store.close()
    assert sorted(acknowledged) == list(range(1, 641))
    assert [call.seq for call in committed] == list(range(1, 641))
    assert len({call.id for call in committed}) == 640


def test_D01_a_reader_in_the_middle_does_not_stop_a_writer(path):
    """The case itself: a transaction that has read, another writer, then a write."""
    one, two = SqliteStore(path), SqliteStore(path)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT max(seq) FROM calls").fetchone() == (None,)
    assert one.append_call(make_call("a")).result(30) == 1
    assert two.append_call(make_call("b")).result(30) == 2
    assert one.append_call(make_call("c")).result(30) == 3
    assert reader.execute("SELECT max(seq) FROM calls").fetchone() == (None,)  # its own snapshot
    reader.close()
    assert [call.id for call in one.calls("attempt-1")] == ["a", "b", "c"]
    one.close()
    two.close()


def test_readers_are_served_while_a_writer_holds_the_lock(path):
    store = SqliteStore(path)
    store.append_call(make_call("a")).result(30)
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    waiting = store.append_call(make_call("b"))
    assert [call.id for call in store.calls("attempt-1")] == ["a"]
    assert store.session("h") is None
    assert not waiting.done()
    locker.execute("COMMIT")
    locker.close()
    assert waiting.result(30) == 2
    store.close()


def test_a_seal_by_another_process_is_seen_at_once(path):
    gateway, trainer = SqliteStore(path), SqliteStore(path)
    trainer.open_session(Session(attempt_id="a", key_hash="h", mode=Mode.TRAIN))
    assert not gateway.session("h").sealed
    trainer.seal("a")
    assert gateway.session("h").sealed
    gateway.close()
    trainer.close()


def test_what_was_queued_during_a_commit_goes_into_one_next_commit(path):
    store = SqliteStore(path)
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    futures = [store.append_call(make_call(f"c{number}")) for number in range(50)]
    locker.execute("COMMIT")
    locker.close()
    assert [future.result(30) for future in futures] == list(range(1, 51))
    store.close()


def test_a_full_queue_refuses_at_once_and_takes_again_later(path):
    store = SqliteStore(path, max_queued=3)
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    futures = [store.append_call(make_call(f"c{number}")) for number in range(3)]
    with pytest.raises(StoreBusy, match="3 writes"):
        store.append_call(make_call("too many"))
    locker.execute("COMMIT")
    locker.close()
    assert [future.result(30) for future in futures] == [1, 2, 3]
    assert store.append_call(make_call("later")).result(30) == 4
    assert store.pending == 0
    store.close()


def test_the_queue_is_bounded_in_bytes_but_takes_one_call_of_any_size(path):
    store = SqliteStore(path, max_queued_bytes=1000)
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    huge = store.append_call(make_call("huge", response=b"x" * 5000))
    with pytest.raises(StoreBusy):
        store.append_call(make_call("small"))
    locker.execute("COMMIT")
    locker.close()
    assert huge.result(30) == 1
    store.close()


def test_closing_commits_what_is_queued(path):
    store = SqliteStore(path)
    futures = [store.append_call(make_call(f"c{number}")) for number in range(20)]
    store.close()
    store.close()
    assert all(future.done() for future in futures)
    with pytest.raises(StoreError, match="closed"):
        store.append_call(make_call("x"))
    with pytest.raises(StoreError, match="closed"):
        store.calls("attempt-1")
    again = SqliteStore(path)
    assert len(again.calls("attempt-1")) == 20
    again.close()


def test_numbers_are_not_used_twice_after_the_newest_calls_were_removed(path):
    store = SqliteStore(path)
    for name in "abc":
        store.append_call(make_call(name)).result(30)
    with sqlite3.connect(path) as other:
        other.execute("DELETE FROM calls")
    other.close()
    assert store.append_call(make_call("d")).result(30) == 4
    store.close()


def test_bodies_and_ids_take_little_room(path):
    store = SqliteStore(path)
    body = b'{"token": " the", "logprob": -0.5, "bytes": [32, 116, 104, 101]}, ' * 1000
    for number in range(50):
        store.append_call(make_call(f"c{number}", response=body)).result(30)
    store.close()
    assert path.stat().st_size < 50 * len(body) * 0.1


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused(path):
    SqliteStore(path).close()
    with sqlite3.connect(path) as other:
        other.execute("INSERT INTO migrations VALUES (?, 0)", (len(MIGRATIONS) + 1,))
    other.close()
    with pytest.raises(StoreError, match=rf"by a newer Outrider \(schema {len(MIGRATIONS) + 1}"):
        SqliteStore(path)


def test_a_migration_that_fails_leaves_nothing_half_done(path, monkeypatch):
    SqliteStore(path).close()
    broken = ("CREATE TABLE extra (x)", "CREATE TABLE calls (x)")
    monkeypatch.setattr("outrider.stores.sqlite_schema.MIGRATIONS", (*MIGRATIONS, broken))
    with pytest.raises(StoreError, match="already exists"):
        SqliteStore(path)
    monkeypatch.undo()
    SqliteStore(path).close()
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM sqlite_master WHERE name = 'extra'").fetchone() == (0,)
    other.close()


def test_a_file_that_is_no_store_is_told(path):
    path.write_bytes(b"this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreError, match=r"store\.sqlite3: .*not a database"):
        SqliteStore(path)


def test_a_folder_that_is_not_there_is_told(tmp_path, monkeypatch):
    with pytest.raises(StoreError) as absolute:
        SqliteStore(tmp_path / "nowhere" / "s.sqlite3")
    folder = f"{tmp_path}/nowhere"
    why = f"there is no folder {folder}; make it with mkdir -p, or name another path"
    assert str(absolute.value) == f"{folder}/s.sqlite3: cannot be opened: {why}."
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=rf"there is no folder {tmp_path}/srv; .*absolute path has four slashes"):
        SqliteStore("srv/s.sqlite3")
    with pytest.raises(StoreError, match="it is a folder; name a file in it"):
        SqliteStore(tmp_path)


def test_the_store_is_in_wal_mode_with_the_synchronous_asked_for(path):
    store = SqliteStore(path)
    store.append_call(make_call("a")).result(30)
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()
    store.close()
    with pytest.raises(StoreError, match="FULL or NORMAL"):
        SqliteStore(path, synchronous="OFF")


# -- a disk that fails -------------------------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
from fakes.records import make_call
from outrider.errors import StoreError
from outrider.stores.sqlite import SqliteStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqliteStore(sys.argv[1])
body = __import__("random").Random(1).randbytes(300_000)
assert store.append_call(make_call("before")).result(30) == 1
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
failed = [store.append_call(make_call(name, response=body)) for name in ("x", "y")]
for future in failed:
    try:
        future.result(30)
    except StoreError as error:
        assert sys.argv[1] in str(error), error
        assert error.__cause__ is not None
    else:
        raise AssertionError("nothing failed")
assert [call.id for call in store.calls("attempt-1")] == ["before"]  # reads still work
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert store.append_call(make_call("after", response=body)).result(30) == 2
assert [call.id for call in store.calls("attempt-1")] == ["before", "after"]
store.close()
"""


def test_a_disk_that_was_full_for_a_while_needs_no_restart(path):
    process = run_python(FULL_DISK, path, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_an_error_of_one_operation_does_not_fail_its_neighbours(path):
    store = SqliteStore(path)
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    good = store.append_call(make_call("a"))
    bad = store.append_call(make_call("b", sampling={"x": object()}))  # no JSON
    also_good = store.append_call(make_call("c"))
    locker.execute("COMMIT")
    locker.close()
    assert (good.result(30), also_good.result(30)) == (1, 2)
    with pytest.raises(StoreError):
        bad.result(30)
    store.close()


def test_a_killed_writer_leaves_whole_calls_only(path):
    code = APPENDER.replace("range(20)", "range(100000)")
    process = run_python(code, path, 0, stdout=subprocess.PIPE)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    reader.start()
    deadline = time.monotonic() + 60
    while len(lines) < 200:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    reader.join()
    process.stdout.close()
    acknowledged = [int(line) for line in lines if line.endswith("\n")]
    store = SqliteStore(path)
    committed = {call.seq for call in store.calls_after(0, limit=10**6)}
    store.close()
    assert set(acknowledged) <= committed
    assert committed == set(range(1, len(committed) + 1))


def test_many_calls_of_one_commit_are_numbered_in_order_also_where_some_are_bad(path):
    store = SqliteStore(path)
    assert store.append_call(make_call("c40")).result(30) == 1
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    futures = [store.append_call(make_call(f"c{number}")) for number in range(100)]  # one of them is there already
    locker.execute("COMMIT")
    locker.close()
    with pytest.raises(StoreError):
        futures[40].result(30)
    numbers = [future.result(30) for number, future in enumerate(futures) if number != 40]
    assert numbers == list(range(2, 101))
    assert [call.id for call in store.calls_after(1)] == [f"c{number}" for number in range(100) if number != 40]
    store.close()


def test_rollouts_are_added_all_or_none(path):
    store = SqliteStore(path)
    with pytest.raises(StoreError):
        store.add_rollouts([make_rollout("a"), make_rollout("b", step=2**70)])
    assert store.rollouts() == []
    assert store.add_rollouts([make_rollout("a")]) == 1
    store.close()


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")
def test_a_crowd_is_not_interrupted_and_a_lone_caller_does_not_wait(path):
    store = SqliteStore(path)
    writer = store._writer._thread.native_id
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    futures = [store.append_call(make_call(f"c{number}")) for number in range(10)]
    locker.execute("COMMIT")
    locker.close()
    for future in futures:
        future.result(30)
    assert os.sched_getscheduler(writer) == os.SCHED_BATCH
    for number in range(LONE_GROUPS + 1):
        store.append_call(make_call(f"lone-{number}")).result(30)
    assert os.sched_getscheduler(writer) == os.SCHED_OTHER
    store.close()
