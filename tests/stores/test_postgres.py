"""What is PostgreSQL's own: several writers at once, followers, lost connections, migrations, text with NUL."""

from __future__ import annotations

import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes.cut_proxy import cut_proxy
from fakes.records import make_call, make_rollout
from outrider.errors import ConfigError, StoreBusy, StoreError
from outrider.stores import postgres_schema
from outrider.stores.postgres import PostgresStore, from_database, to_database
from outrider.types import Attempt, Mode, Reward, RolloutState, Session

# A commit that takes a while, and not the same while each time, in the transaction that has taken its number already.
SLOW_COMMITS = """
    CREATE FUNCTION {schema}.be_slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(random() * 0.004); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {schema}.calls DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION {schema}.be_slow();
"""


@pytest.fixture
def schema(postgres_server):
    return postgres_server.new_schema()


@pytest.fixture
def admin(postgres_server):
    with postgres_server.admin() as connection:
        yield connection


@pytest.fixture
def proxy(postgres_server):
    with cut_proxy(postgres_server.socket_path) as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(proxy, schema):
    store = PostgresStore(f"postgresql://postgres:secret@127.0.0.1:{proxy.port}/postgres", schema=schema)
    yield store
    store.close()


def lock_out(admin, schema):
    """Hold the store's lock until the connection commits, as another gateway's slow transaction does."""
    admin.execute("BEGIN")
    admin.execute(f"SET LOCAL search_path = {schema}")
    admin.execute(postgres_schema.LOCK)


# -- several writers, and followers ------------------------------------------------------------------------------------


def test_a_follower_misses_no_commit_of_several_slow_writers(postgres_server, schema, admin):
    writers = [PostgresStore(postgres_server.url, schema=schema) for _ in range(4)]
    admin.execute(SLOW_COMMITS.format(schema=schema))
    seen, done = [], threading.Event()

    def follow(store):
        last = 0
        while True:
            ended = done.is_set()
            found = [call.seq for call in store.calls_after(last, limit=7)]
            seen.extend(found)
            last = found[-1] if found else last
            if ended and not found:
                return

    def append(worker):
        store, rng = writers[worker % 4], random.Random(worker)
        numbers = []
        for number in range(12):
            numbers.append(store.append_call(make_call(f"c{worker}-{number}", f"a{worker}")).result(60))
            time.sleep(rng.random() * 0.004)
        return numbers

    follower = threading.Thread(target=follow, args=(writers[0],))
    follower.start()
    with ThreadPoolExecutor(16) as pool:
        acknowledged = [seq for numbers in pool.map(append, range(16)) for seq in numbers]
    done.set()
    follower.join(60)
    assert seen == sorted(acknowledged) == list(range(1, 16 * 12 + 1))
    for store in writers:
        store.close()


def test_writers_of_two_schemas_do_not_wait_for_each_other(postgres_server, postgres_store, schema, admin):
    other = PostgresStore(postgres_server.url, schema=schema)
    lock_out(admin, schema)
    waiting = other.append_call(make_call("a"))
    assert postgres_store.append_call(make_call("a")).result(30) == 1
    assert not waiting.done()
    admin.execute("COMMIT")
    assert waiting.result(30) == 1
    other.close()


def test_readers_do_not_wait_for_a_writer_that_holds_the_lock(postgres_store, admin):
    postgres_store.append_call(make_call("a")).result(30)
    lock_out(admin, postgres_store.schema)
    waiting = postgres_store.append_call(make_call("b"))
    assert [call.id for call in postgres_store.calls("attempt-1")] == ["a"]
    assert postgres_store.session("h") is None
    assert not waiting.done()
    admin.execute("COMMIT")
    assert waiting.result(30) == 2


def test_a_seal_by_another_process_is_seen_at_once(postgres_server, postgres_store):
    trainer = PostgresStore(postgres_server.url, schema=postgres_store.schema)
    trainer.open_session(Session(attempt_id="a", key_hash="h", mode=Mode.TRAIN))
    assert not postgres_store.session("h").sealed
    trainer.seal("a")
    assert postgres_store.session("h").sealed
    trainer.close()


def test_what_was_queued_during_a_commit_goes_into_one_next_commit(postgres_store, admin):
    lock_out(admin, postgres_store.schema)
    futures = [postgres_store.append_call(make_call(f"c{number}")) for number in range(50)]
    admin.execute("COMMIT")
    assert [future.result(30) for future in futures] == list(range(1, 51))
    admin.execute(f"SET search_path = {postgres_store.schema}")
    (transactions,) = admin.execute("SELECT count(DISTINCT xmin::text) FROM calls").fetchone()
    assert transactions <= 2  # the first call may have been alone


def test_a_full_queue_refuses_at_once_and_takes_again_later(postgres_server, schema, admin):
    store = PostgresStore(postgres_server.url, schema=schema, max_queued=3)
    lock_out(admin, schema)
    futures = [store.append_call(make_call(f"c{number}")) for number in range(3)]
    with pytest.raises(StoreBusy):
        store.append_call(make_call("too many"))
    admin.execute("COMMIT")
    assert [future.result(30) for future in futures] == [1, 2, 3]
    assert store.append_call(make_call("later")).result(30) == 4
    assert store.pending == 0
    store.close()


def test_more_readers_than_connections_take_turns(postgres_server, schema):
    store = PostgresStore(postgres_server.url, schema=schema, max_readers=2)
    store.append_call(make_call("a")).result(30)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: len(store.calls("attempt-1")), range(40)))
    assert found == [1] * 40
    store.close()


# -- lost connections --------------------------------------------------------------------------------------------------


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


def test_closing_commits_what_is_queued(postgres_server, schema, admin):
    store = PostgresStore(postgres_server.url, schema=schema)
    lock_out(admin, schema)
    futures = [store.append_call(make_call(f"c{number}")) for number in range(20)]
    admin.execute("COMMIT")
    store.close()
    store.close()
    assert [future.result(0) for future in futures] == list(range(1, 21))
    for ask in (lambda: store.append_call(make_call("x")), lambda: store.calls("attempt-1")):
        with pytest.raises(StoreError, match="closed"):
            ask()


# -- rows that can't be written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"sampling": {"x": object()}}, {"model": "\ud800"}, {"status": 2**70}],
    ids=["no JSON", "no UTF-8", "too large a number"],
)
def test_a_bad_call_fails_alone(postgres_store, admin, fields):
    lock_out(admin, postgres_store.schema)
    postgres_store.append_call(make_call("first"))
    good = postgres_store.append_call(make_call("a"))
    bad = postgres_store.append_call(make_call("b", **fields))
    also_good = postgres_store.append_call(make_call("c"))
    admin.execute("COMMIT")
    assert good.result(30) < also_good.result(30)
    with pytest.raises(StoreError):
        bad.result(30)
    assert [call.id for call in postgres_store.calls_after(0)] == ["first", "a", "c"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\0\ue000\ue001\ue002"))


@given(TEXT)
@example("\0")
@example("\ue000")
@example("\ue000\ue001")
@example("\ue000\0\ue002")
def test_any_text_survives(text):
    (stored,) = to_database((text,))
    assert "\0" not in stored
    assert from_database((stored,)) == (text,)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_hostile_text_comes_back_as_it_went_in(postgres_store, text):
    number = uuid.uuid4().hex
    attempt = Attempt(id=number + text, rollout_id=text, number=1, stdout_tail=text + "\0", reason=text)
    postgres_store.put_attempt(attempt)
    assert attempt in postgres_store.attempts(text)
    call = make_call(number, text, model=text, sampling={"stop": text})
    postgres_store.append_call(call).result(30)
    found = postgres_store.calls(text)[-1]
    assert (found.id, found.model, found.sampling) == (call.id, text, {"stop": text})


# -- opening -----------------------------------------------------------------------------------------------------------


def test_processes_that_start_together_make_one_schema(postgres_server, schema):
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: PostgresStore(postgres_server.url, schema=schema), range(8)))
    numbers = [store.append_call(make_call(f"c{number}")).result(30) for number, store in enumerate(stores)]
    assert numbers == list(range(1, 9))
    for store in stores:
        store.close()


def test_a_newer_schema_is_refused(postgres_server, postgres_store, admin):
    newer = len(postgres_schema.MIGRATIONS) + 1
    admin.execute(f"INSERT INTO {postgres_store.schema}.migrations VALUES ({newer}, now())")
    with pytest.raises(StoreError, match=f"written by a newer Outrider \\(schema {newer}"):
        PostgresStore(postgres_server.url, schema=postgres_store.schema)


def test_a_migration_that_fails_leaves_nothing_half_done(postgres_server, postgres_store, admin, monkeypatch):
    broken = ("CREATE TABLE extra (x int)", "CREATE TABLE calls (x int)")
    monkeypatch.setattr(postgres_schema, "MIGRATIONS", (*postgres_schema.MIGRATIONS, broken))
    with pytest.raises(StoreError, match="already exists"):
        PostgresStore(postgres_server.url, schema=postgres_store.schema)
    assert admin.execute("SELECT to_regclass(%s)", (f"{postgres_store.schema}.extra",)).fetchone() == (None,)


def test_a_user_without_the_right_to_create_can_use_what_is_there(postgres_server, postgres_store, admin):
    user, schema = f"{postgres_store.schema}_user", postgres_store.schema
    admin.execute(
        f"CREATE ROLE {user} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {user};"
        f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO {user}; GRANT ALL ON ALL SEQUENCES IN SCHEMA {schema} TO {user}"
    )
    store = PostgresStore(postgres_server.url.replace("postgres:@", f"{user}:@"), schema=schema)
    assert store.append_call(make_call("a")).result(30) == 1
    store.close()


def test_what_cannot_be_opened_is_told_without_the_password(proxy):
    proxy.up = False
    with pytest.raises(StoreError, match=f"postgresql://127.0.0.1:{proxy.port}/x: cannot connect") as error:
        PostgresStore(f"postgresql://u:secret@127.0.0.1:{proxy.port}/x")
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="postgresql://user:password@host/database") as wrong:
        PostgresStore("postgresql://u:secret@host/x?nonsense=1")
    assert "secret" not in str(wrong.value)
    for arguments in ({"schema": 'x"; DROP'}, {"synchronous": "OFF"}):
        with pytest.raises(ConfigError):
            PostgresStore("postgresql://u:secret@host/x", **arguments)


@pytest.mark.parametrize(("synchronous", "expected"), [("FULL", "on"), ("NORMAL", "off")])
def test_the_durability_asked_for_is_set(postgres_server, schema, admin, synchronous, expected):
    try:
        admin.execute("ALTER ROLE postgres SET synchronous_commit = off")  # a server that asks for too little
        store = PostgresStore(postgres_server.url, synchronous, schema=schema)
        # The writer's own connection tells, through the values table.
        store.write("INSERT INTO \"values\" VALUES ('durability', current_setting('synchronous_commit'))", ())
        assert store.value("durability") == expected
        store.close()
    finally:
        admin.execute("ALTER ROLE postgres RESET synchronous_commit")
