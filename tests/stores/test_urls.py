import sys

import psycopg
import pytest

from fakes.records import make_call
from outrider.errors import ConfigError, SetupError, StoreError
from outrider.stores import open_store
from outrider.stores.postgres import PostgresStore
from outrider.stores.sqlite import SqliteStore


def test_a_sqlite_url_names_a_relative_or_an_absolute_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url, path in (("sqlite:///a.sqlite3", "a.sqlite3"), (f"sqlite:///{tmp_path}/b.sqlite3", "b.sqlite3")):
        store = open_store(url, synchronous="NORMAL")
        assert isinstance(store, SqliteStore)
        assert store.append_call(make_call("a")).result(30) == 1
        store.close()
        assert (tmp_path / path).exists()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_a_postgres_url_opens_the_server(postgres_server, scheme):
    store = open_store(postgres_server.url.replace("postgresql:", f"{scheme}:"), synchronous="NORMAL")
    assert isinstance(store, PostgresStore)
    assert store.value("nothing") is None
    store.close()
    with postgres_server.admin() as admin:
        admin.execute("DROP SCHEMA outrider CASCADE")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/store.sqlite3", "'runs/store.sqlite3' is no store URL; write sqlite:///PATH or postgresql://"),
        ("", "is no store URL"),
        ("sqlite://store.sqlite3", "names a host, which SQLite has none of; write sqlite:///store.sqlite3"),
        ("sqlite:///", "names no file"),
        ("mysql://host/db", "no store called 'mysql'.*Known: postgres, postgresql, sqlite"),
        ("postgresq://host/db", "Did you mean 'postgresql'"),
    ],
)
def test_what_is_no_url_of_ours_is_told(url, said):
    with pytest.raises(ConfigError, match=said):
        open_store(url)


def test_a_password_is_in_no_message():
    with pytest.raises(StoreError) as error:
        open_store("postgresql://u:secret@127.0.0.1:1/x")
    assert "secret" not in str(error.value)


def test_a_password_that_is_missing_is_told_and_where_to_put_it(monkeypatch):
    def refuse(*_, **__):
        raise psycopg.OperationalError("connection failed: fe_sendauth: no password supplied")

    monkeypatch.setattr(psycopg, "connect", refuse)
    with pytest.raises(StoreError, match=r"no password supplied\. The URL names none .*set PGPASSWORD"):
        open_store("postgresql://u@host/x")


def test_a_missing_extra_is_named(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("psycopg", "outrider.stores.postgres"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SetupError, match=r"pip install 'outrider\[postgres\]'"):
        open_store("postgresql://u@host/x")


def test_a_file_or_a_run_folder_is_told_how_to_be_written(tmp_path):
    (tmp_path / "store.sqlite3").touch()
    for named in (tmp_path, tmp_path / "store.sqlite3"):
        with pytest.raises(ConfigError, match=rf"Did you mean sqlite:///{tmp_path}/store.sqlite3\?"):
            open_store(str(named))
