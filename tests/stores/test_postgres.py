"""What is PostgreSQL's own: several writers at once, followers, migrations, text with NUL."""

from __future__ import annotations

import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fakes.postgres_server import lock_out
from fakes.records import make_call
from outrider.errors import ConfigError, StoreBusy, StoreError
from outrider.stores import postgres_schema
from outrider.stores.postgres import PostgresStore, from_database, to_database
from outrider.types import Attempt, Mode, Session

# A commit that takes a while, and not the same while each time, in the transaction that has taken its number already.
SLOW_COMMITS = """
    CREATE FUNCTION {schema}.be_slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(random() * 0.004); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {schema}.calls DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION {schema}.be_slow();
"""


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
    [{"sampling": {"x": object()}}, {"dialect": "\ud800"}, {"status": 2**70}],
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
