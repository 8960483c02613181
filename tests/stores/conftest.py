from __future__ import annotations

import pytest

from fakes.cut_proxy import cut_proxy
from fakes.postgres_server import running_postgres
from outrider.stores.postgres import PostgresStore
from outrider.stores.sqlite import SqliteStore


@pytest.fixture(scope="session")
def postgres_server():
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_store(postgres_server):
    """A store of its own for the test."""
    store = PostgresStore(postgres_server.url, schema=postgres_server.new_schema())
    yield store
    store.close()


@pytest.fixture
def sqlite_store(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite3")
    yield store
    store.close()


@pytest.fixture(params=["sqlite", "postgres"])
def durable_store(request):
    """Each of the stores that keep data."""
    return request.getfixturevalue(f"{request.param}_store")


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
