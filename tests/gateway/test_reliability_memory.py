"""Large bodies: what they cost in memory, and that it is given back."""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from fakes.engine import Answer
from fakes.gateway import CHAT, RunningGateway, wait_for
from fakes.records import make_call
from outrider.stores.sqlite import SqliteStore


def test_a_writer_with_nothing_to_do_holds_no_body(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite3")
    call = make_call("a", request=b"x" * 1000)
    before = sys.getrefcount(call)
    store.append_call(call).result(30)
    wait_for(lambda: sys.getrefcount(call) == before)
    store.close()


def test_large_bodies_together_take_no_more_than_there_is_room_for(engine, tmp_path):
    gate = threading.Event()
    with RunningGateway(engine, tmp_path / "s.sqlite3", mode="train", max_body_mb=2) as gateway, gate_opens(gate):
        key = gateway.open()
        large = {"model": "policy", "messages": [{"role": "user", "content": "x" * 1_900_000}]}
        room = gateway.server._gateway._room
        room.take(room._limit - 4_000_000, 0)  # the others': two more fit in
        engine.answers.extend(Answer(chunks=[b"", b"{}"], gate=gate) for _ in range(2))
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(gateway.post, f"/s/{key}{CHAT}", large) for _ in range(2)]
            wait_for(lambda: len(engine.received) == 2)
            got = gateway.post(f"/s/{key}{CHAT}", large)
            assert got.status == 503
            assert int(got.headers["retry-after"]) > 0
            assert gateway.chat(key).status == 200  # a small one finds its place
            gate.set()
            assert {future.result(60).status for future in waiting} <= {200, 502}
        assert gateway.post(f"/s/{key}{CHAT}", large).status == 200
        gateway.open_socket(f"/s/{key}{CHAT}", large).close()  # and one that is given up gives its room back
        wait_for(lambda: room.held == room._limit - 4_000_000)


@contextlib.contextmanager
def gate_opens(gate):
    try:
        yield
    finally:
        gate.set()
