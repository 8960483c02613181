from __future__ import annotations

import pytest

from fakes.postgres_server import running_postgres


@pytest.fixture(scope="session")
def postgres_server():
    with running_postgres() as server:
        yield server
