"""A column that came later: kept by every store, and empty for calls from before it."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from fakes.records import make_call, make_choice
from outrider.stores import postgres_schema, sqlite_schema
from outrider.stores.postgres import PostgresStore
from outrider.stores.sqlite import SqliteStore
from outrider.stores.sqlite_schema import MIGRATIONS, migrate
from outrider.types import Retry


def test_how_a_prompt_came_about_is_kept(durable_store):
    durable_store.append_call(make_call("c1", continuation="broke: tools changed")).result(30)
    durable_store.append_call(make_call("c2")).result(30)
    assert [call.continuation for call in durable_store.calls("attempt-1")] == ["broke: tools changed", ""]


def test_where_a_call_went_is_kept(durable_store):
    retries = (
        Retry(replica="http://a", status=503, error="busy", duration_s=0.25, wait_s=1.5),
        Retry(replica="http://b", status=0, error="cannot connect", duration_s=0.0, wait_s=0.0),
    )
    durable_store.append_call(make_call("c1", replica="http://c", retries=retries)).result(30)
    durable_store.append_call(make_call("c2")).result(30)
    first, second = durable_store.calls("attempt-1")
    assert (first.replica, first.retries) == ("http://c", retries)
    assert (second.replica, second.retries) == ("", ())


def test_the_versions_of_tokens_are_kept(durable_store):
    choices = (
        make_choice(0, [5, 6, 7], [-0.5] * 3, versions=((3, 1), (4, 2))),
        make_choice(1, [8], [-0.5]),
        make_choice(2, [9], [-0.5], versions=((4, 1),)),
    )
    durable_store.append_call(make_call("c1", choices=choices, version_start=3, version_end=4)).result(30)
    durable_store.append_call(make_call("c2", version_start=4, version_end=4)).result(30)
    first, second = durable_store.calls("attempt-1")
    assert [choice.versions for choice in first.choices] == [((3, 1), (4, 2)), (), ((4, 1),)]
    assert [choice.versions for choice in second.choices] == [()]


OLD_ROWS = (
    "INSERT INTO calls ({seq}id, attempt_id, dialect, model, state, status, streamed, fidelity, fidelity_reason,"
    " sampling, started_at, duration_s, error, choices, token_ids, logprobs, request, response)"
    " VALUES ({next}'c1', 'a', 'd', 'm', 'complete', 200, false, 'text', '', '{{}}', 0, 0,"
    " '', '[]', {empty}, {empty}, {empty}, {empty})",
    "INSERT INTO rewards (attempt_id, name, value, reason, parts, source, created_at)"
    " VALUES ('a', 'final', 0.5, '', '{{}}', '', 0)",
)


def check_old_rows(store):
    """Those of `OLD_ROWS` are read, with defaults for what came later, and new ones follow."""
    (call,) = store.calls("a")
    assert (call.id, call.continuation, call.replica, call.retries) == ("c1", "", "", ())
    assert [reward.call_id for reward in store.rewards("a")] == [""]
    assert store.append_call(make_call("c2", "a", replica="http://c")).result(30) == call.seq + 1


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))
def test_a_file_of_any_older_version_is_brought_up_to_date(tmp_path, monkeypatch, version):
    path = tmp_path / "old.sqlite3"
    with monkeypatch.context() as before:
        before.setattr(sqlite_schema, "MIGRATIONS", MIGRATIONS[:version])
        connection = sqlite3.connect(path, isolation_level=None)
        migrate(connection, "old")
        for statement in OLD_ROWS:
            connection.execute(statement.format(seq="", next="", empty="x''"))
        connection.close()
    with contextlib.closing(SqliteStore(path)) as store:
        check_old_rows(store)


@pytest.mark.parametrize("version", range(1, len(postgres_schema.MIGRATIONS)))
def test_a_schema_of_any_older_version_is_brought_up_to_date(postgres_server, schema, monkeypatch, version):
    with monkeypatch.context() as before:
        before.setattr(postgres_schema, "MIGRATIONS", postgres_schema.MIGRATIONS[:version])
        store = PostgresStore(postgres_server.url, schema=schema)
        with store.connect() as connection:
            for statement in OLD_ROWS:
                connection.execute(statement.format(seq="seq, ", next="nextval('calls_seq'), ", empty="''"))
        store.close()
    with contextlib.closing(PostgresStore(postgres_server.url, schema=schema)) as store:
        check_old_rows(store)
