from __future__ import annotations

import pytest

from fakes.postgres_server import running_postgres
from outrider.stores.postgres import PostgresStore


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
