"""A disk that is full or fails, and a writer that is held up, by SQLite's own doing: told, survived, nothing lost.

No test here needs root. A full disk is a database that may not grow (`PRAGMA max_page_count`): SQLite then says
SQLITE_FULL as it does on ENOSPC. An I/O error is a limit on the size of files (RLIMIT_FSIZE), set and lifted while the
gateway runs: a write fails with EFBIG, which SQLite calls a disk I/O error. `bench/reliability.py` fills a tmpfs.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES, RunningGateway, wait_for
from fakes.process import GatewayProcess
from fakes.records import make_call
from outrider.errors import StoreError
from outrider.keys import hash_key, new_key
from outrider.stores import packing
from outrider.stores.sqlite import SqliteStore
from outrider.types import CallState, Mode, Session

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])


class Disk:
    """Under a gateway in this process; `full` may be set at any time."""

    def __init__(self, store, monkeypatch):
        self.full = False
        self._connect = store._connect_writer
        monkeypatch.setattr(store._writer, "_connect", self._connected)
        store._writer._connection = self._connected()  # nobody is writing yet

    def _connected(self):
        self.connection = self._connect()
        self._limit()
        return self.connection

    def _limit(self):
        pages = self.connection.execute("PRAGMA page_count").fetchone()[0] if self.full else 2**31 - 2
        self.connection.execute(f"PRAGMA max_page_count = {pages}")

    def set(self, full):
        self.full = full
        with contextlib.suppress(sqlite3.ProgrammingError):  # closed since: the next one is limited when it is made
            self._limit()


@BOTH
def test_a_full_disk_is_told_at_once_and_left_behind_without_a_restart(engine, tmp_path, monkeypatch, streamed):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway:
        disk = Disk(gateway.store, monkeypatch)
        key = gateway.open()
        assert gateway.chat(key, stream=streamed).status == 200
        disk.set(full=True)
        filler, answered = "".join(chr(33 + (7 * n * n + n) % 90) for n in range(60_000)), 0
        for _ in range(50):
            got = gateway.chat(key, stream=streamed, user=filler)
            if is_refused(got, streamed):
                break
            answered += 1
        assert is_refused(gateway.chat(key, stream=streamed, user=filler), streamed)
        assert len(gateway.store.calls("attempt-1")) == 1 + answered
        for path in ("/admin/attempts/attempt-1/calls", "/admin/stats", "/health"):
            got = gateway.request("GET", path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
            assert got.status == 200, path
        disk.set(full=False)
        wait_for(lambda: not is_refused(gateway.chat(key, stream=streamed, user=filler), streamed))
        assert gateway.recorded(2 + answered)[-1].state is CallState.COMPLETE


def is_refused(got, streamed):
    """Refused in the protocol's shape, or not at all."""
    told = got.events[-1] if streamed and got.status == 200 else got.json
    if told == "[DONE]" or "choices" in told:
        return False
    assert told["error"]["code"] == "store_failed"
    assert "full" in told["error"]["message"]
    assert got.status == 200 or (got.status in (503, 507) and int(got.headers["retry-after"]) > 0)
    return True


def test_an_IO_error_loses_no_answered_call_and_needs_no_restart(engine, tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite3")
    key = new_key()
    store.open_session(Session(attempt_id="attempt-1", key_hash=hash_key(key), mode=Mode.TRAIN))
    with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
        process = psutil.Process(gateway.process.pid)
        answered = [name for name in ("a", "b") if post(gateway, key, name) == 200]
        process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        refused = [post(gateway, key, f"refused-{number}") for number in range(5)]
        assert set(refused) == {503}
        process.rlimit(resource.RLIMIT_FSIZE, UNLIMITED)
        wait_for(lambda: post(gateway, key, "again") == 200)
        answered.append("again")
    names = [json.loads(call.request)["user"] for call in store.calls("attempt-1")]
    assert names == answered
    store.close()


def test_a_row_that_cannot_be_made_does_not_end_the_writer(tmp_path, monkeypatch):
    store = SqliteStore(tmp_path / "s.sqlite3")
    with monkeypatch.context() as patch:
        patch.setattr(packing, "call_row", lambda call, bodies: [][0] if call.id == "a" else 1 / 0)
        for id in ("a", "b"):
            with pytest.raises(StoreError):
                store.append_call(make_call(id)).result(30)
    assert store.append_call(make_call("c")).result(30) == 1
    store.close()


def post(gateway, key, name):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES, "user": name}))
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_a_writer_that_is_held_up_fills_a_bounded_queue_and_drops_nothing(engine, tmp_path, monkeypatch):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway:
        key = gateway.open()
        monkeypatch.setattr(gateway.store._writer, "_max_queued", 8)
        statuses, lock = [], threading.Lock()

        def call(number):
            got = gateway.chat(key, user=f"call-{number}")
            with lock:
                statuses.append(got.status)
            if got.status == 503:
                assert got.json["error"]["code"] == "store_busy"
                assert int(got.headers["retry-after"]) > 0
            return got.status

        with sqlite3.connect(tmp_path / "s.sqlite3", isolation_level=None) as other, ThreadPoolExecutor(24) as pool:
            other.execute("BEGIN IMMEDIATE")
            calls = [pool.submit(call, number) for number in range(24)]
            wait_for(lambda: len(statuses) == 16)  # the other 8 wait for the lock
            assert set(statuses) == {503}
            assert gateway.request("GET", "/health").status == 200
            time.sleep(0.2)
            assert len(statuses) == 16
            other.execute("ROLLBACK")
            assert sorted(future.result(60) for future in calls) == [200] * 8 + [503] * 16
        other.close()
        assert len(gateway.recorded(8)) == 8
        assert gateway.chat(key).status == 200


def test_other_routes_answer_while_the_writer_is_held_up(engine, tmp_path):
    """What waits for the store must not use up the threads that everybody shares."""
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train") as gateway:
        key = gateway.open()
        assert gateway.chat(key).status == 200
        with sqlite3.connect(tmp_path / "s.sqlite3", isolation_level=None) as other, ThreadPoolExecutor(40) as pool:
            other.execute("BEGIN IMMEDIATE")
            calls = [pool.submit(gateway.chat, key) for _ in range(40)]
            wait_for(lambda: len(engine.received) == 41)
            time.sleep(4)  # longer than the gateways' signs of life to each other are apart
            for path in ("/admin/attempts/attempt-1/calls", "/admin/stats", "/health"):
                got = gateway.request("GET", path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
                assert got.status == 200
            other.execute("ROLLBACK")
            assert {future.result(60).status for future in calls} == {200}
        other.close()


def test_a_clock_that_is_set_back_changes_neither_order_nor_durations(engine, tmp_path, monkeypatch):
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train", upstream_timeout_s=20) as gateway:
        key = gateway.open(expires_at=time.time() + 10_000)
        engine.delay_s = 0.05
        wall = time.time
        for number in range(6):
            gateway.chat(key, user=str(number), stream=number % 2 == 1)
            if number == 2:
                monkeypatch.setattr(time, "time", lambda: wall() - 3600)
        gate = threading.Timer(0.02, lambda: monkeypatch.setattr(time, "time", lambda: wall() - 7200))
        gate.start()  # and once within a call
        gateway.chat(key, user="6")
        gate.join()
        calls = gateway.recorded(7)
    assert [json.loads(call.request)["user"] for call in calls] == [str(number) for number in range(7)]
    assert [call.seq for call in calls] == list(range(1, 8))
    assert calls[3].started_at < calls[2].started_at - 3000
    for call in calls:
        assert 0.04 <= call.duration_s < 20
        assert call.first_token_s is None or 0 <= call.first_token_s <= call.duration_s
