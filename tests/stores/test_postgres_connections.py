"""Connections that break at any moment: nothing acknowledged is lost, nothing written twice, no restart is needed."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fakes.postgres_server import lock_out
from fakes.records import make_call, make_rollout
from outrider.errors import StoreError
from outrider.stores.postgres import PostgresStore
from outrider.types import Reward, RolloutState


def terminate_all(admin, name="outrider"):
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", (name,))


def test_connections_that_the_server_closed_are_made_anew(postgres_store, admin):
    assert postgres_store.append_call(make_call("a")).result(30) == 1
    assert postgres_store.value("x") is None
    terminate_all(admin)
    assert postgres_store.append_call(make_call("b")).result(30) == 2
    assert [call.id for call in postgres_store.calls("attempt-1")] == ["a", "b"]


def test_a_group_whose_connection_breaks_before_its_commit_is_run_again(postgres_store, admin, postgres_server):
    postgres_store.append_call(make_call("a")).result(30)
    lock_out(admin, postgres_store.schema)
    waiting = postgres_store.append_call(make_call("b"))
    with postgres_server.admin() as second:
        wait_until(lambda: second.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (1,))
        terminate_all(second)
    admin.execute("COMMIT")
    assert waiting.result(30) == 2
    assert [call.id for call in postgres_store.calls_after(0)] == ["a", "b"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lose_the_next_commit(proxy):
    proxy.swallowed.clear()
    proxy.swallow = b"COMMIT"


def test_what_was_committed_without_an_answer_is_acknowledged_once(behind_proxy, proxy):
    store = behind_proxy
    store.add_rollouts([make_rollout("r")])
    lose_the_next_commit(proxy)
    assert store.append_call(make_call("a")).result(60) == 1
    assert proxy.swallowed.is_set()
    lose_the_next_commit(proxy)
    store.add_reward(Reward(attempt_id="attempt-1", value=1.0)).result(60)
    lose_the_next_commit(proxy)
    running = replace(make_rollout("r"), state=RolloutState.RUNNING, attempt=1)
    assert store.transition(running, expect=(RolloutState.QUEUED, 0))
    lose_the_next_commit(proxy)
    assert store.add_rollouts([make_rollout("s")]) == 1
    assert proxy.swallowed.is_set()
    assert [call.id for call in store.calls_after(0)] == ["a"]
    assert len(store.rewards("attempt-1")) == 1


def test_a_commit_that_never_reached_the_server_is_run_again(behind_proxy, proxy, admin):
    store = behind_proxy
    admin.execute(f"SET search_path = {store.schema}")
    # The transaction is ended by the server at the commit, as by a crash just before it.
    admin.execute(
        "CREATE SEQUENCE commits; "
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF nextval('commits') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; "
        "RETURN NULL; END $$; "
        "CREATE CONSTRAINT TRIGGER die AFTER INSERT ON calls DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION die()"
    )
    numbers = [store.append_call(make_call(name)).result(60) for name in ("a", "b")]
    assert [call.seq for call in store.calls_after(0)] == numbers
    assert [call.id for call in store.calls_after(0)] == ["a", "b"]
    assert admin.execute("SELECT last_value FROM commits").fetchone() == (3,)  # one died


def test_connections_cut_at_random_moments_lose_and_repeat_nothing(behind_proxy, proxy, postgres_server):
    store, stop = behind_proxy, threading.Event()
    other = PostgresStore(postgres_server.url, schema=store.schema)  # a gateway whose connections stay whole
    seen = []

    def cut():
        rng = random.Random(0)
        while not stop.wait(rng.random() * 0.03):
            proxy.cut()

    def follow():
        last, ended = 0, False
        while not ended:
            ended = stop.is_set()
            for call in other.calls_after(last):
                last = call.seq  # with gaps, where a transaction was rolled back
                seen.append(call.id)

    def append(worker):
        outcomes = []
        for number in range(25):
            writer = other if worker == 0 else store
            name = f"c{worker}-{number}"
            try:
                writer.append_call(make_call(name)).result(60)
                writer.add_reward(Reward(attempt_id=name, value=1.0)).result(60)
                outcomes.append((name, True))
            except StoreError:  # cut three times in a row, before the commit
                outcomes.append((name, False))
        return outcomes

    threads = [threading.Thread(target=cut), threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            outcomes = [outcome for outcomes in pool.map(append, range(8)) for outcome in outcomes]
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    found = [call.id for call in other.calls_after(0, limit=10**6)]
    assert seen == found
    assert len(set(found)) == len(found)
    assert {name for name, acknowledged in outcomes if acknowledged} <= set(found)
    assert [len(other.rewards(name)) for name, acknowledged in outcomes if acknowledged].count(1) == sum(
        acknowledged for _, acknowledged in outcomes
    )
    other.close()


def test_while_the_server_is_away_calls_fail_and_later_ones_do_not(behind_proxy, proxy):
    store = behind_proxy
    assert store.append_call(make_call("a")).result(30) == 1
    assert store.value("x") is None
    proxy.up = False
    proxy.cut()
    for ask in (store.append_call(make_call("b")).result, lambda: store.session("h"), lambda: store.seal("x")):
        with pytest.raises(StoreError, match=f"postgresql://127.0.0.1:{proxy.port}/postgres: ") as error:
            ask()
        assert "secret" not in str(error.value)
    proxy.up = True
    assert store.append_call(make_call("b")).result(30) == 2
    assert [call.id for call in store.calls("attempt-1")] == ["a", "b"]


def test_an_unknown_commit_is_told_as_such_when_the_server_stays_away(proxy, schema):
    url = f"postgresql://postgres:secret@127.0.0.1:{proxy.port}/postgres"
    store = PostgresStore(url, schema=schema, resolve_s=0.5)
    store.append_call(make_call("a")).result(30)
    lose_the_next_commit(proxy)
    proxy.up = False
    with pytest.raises(StoreError, match="may or may not be there"):
        store.append_call(make_call("b")).result(60)
    proxy.up = True
    assert store.append_call(make_call("c")).result(30) == 3
    assert [call.id for call in store.calls_after(0)] == ["a", "b", "c"]
    store.close()


def test_a_server_that_crashes_loses_nothing_acknowledged_and_needs_no_restart_of_ours(postgres_server, schema):
    store = PostgresStore(postgres_server.url, schema=schema)
    acknowledged, refused, stop = [], [], threading.Event()

    def append(worker):
        number = 0
        while not stop.is_set():
            number += 1
            name = f"c{worker}-{number}"
            try:
                acknowledged.append((store.append_call(make_call(name)).result(60), name))
            except StoreError:
                refused.append(name)
                stop.wait(0.05)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(append, worker) for worker in range(4)]
        wait_until(lambda: len(acknowledged) > 50)
        postgres_server.crash()
        postgres_server.start()
        before = len(acknowledged)
        wait_until(lambda: len(acknowledged) > before + 50)
        stop.set()
    for future in running:
        future.result()
    found = [(call.seq, call.id) for call in store.calls_after(0, limit=10**6)]
    assert len(found) == len({name for _, name in found})
    assert set(acknowledged) <= set(found)
    assert {name for _, name in found} <= {name for _, name in acknowledged} | set(refused)
    store.close()
