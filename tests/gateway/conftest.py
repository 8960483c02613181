from __future__ import annotations

import pytest

from fakes.engine import ScriptedEngine
from fakes.gateway import Host, HostedGateway


@pytest.fixture(scope="session")
def host():
    host = Host()
    yield host
    host.stop()


@pytest.fixture
def engine():
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def start(host, engine, tmp_path):
    """Starts a gateway with other options than the usual ones."""
    return lambda **options: HostedGateway(host, engine, tmp_path / "store.sqlite3", **options)


@pytest.fixture
def gateway(start):
    """A gateway that takes attempt keys only."""
    with start(mode="train") as gateway:
        yield gateway
