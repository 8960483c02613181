"""A column that came later: kept by every store, and empty for calls from before it."""

from __future__ import annotations

import sqlite3

from fakes.records import make_call
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


def test_a_file_from_before_is_brought_up_to_date(tmp_path, monkeypatch):
    path = tmp_path / "old.sqlite3"
    with monkeypatch.context() as before:
        before.setattr("outrider.stores.sqlite_schema.MIGRATIONS", MIGRATIONS[:1])
        connection = sqlite3.connect(path, isolation_level=None)
        migrate(connection, "old")
        connection.execute(
            "INSERT INTO calls (id, attempt_id, dialect, model, state, status, streamed, fidelity, fidelity_reason,"
            " sampling, started_at, duration_s, error, choices, token_ids, logprobs, request, response)"
            " VALUES ('c1', 'a', 'd', 'm', 'complete', 200, 0, 'text', '', '{}', 0, 0, '', '[]', x'', x'', x'', x'')"
        )
        connection.execute(
            "INSERT INTO rewards (attempt_id, name, value, reason, parts, source, created_at)"
            " VALUES ('a', 'final', 0.5, '', '{}', '', 0)"
        )
        connection.close()
    store = SqliteStore(path)
    try:
        (call,) = store.calls("a")
        assert (call.continuation, call.replica, call.retries) == ("", "", ())
        assert [reward.call_id for reward in store.rewards("a")] == [""]
    finally:
        store.close()
