from __future__ import annotations

import pytest

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
