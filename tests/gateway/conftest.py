from __future__ import annotations

import pytest

from fakes.engine import ScriptedEngine
from fakes.gateway import RunningGateway


@pytest.fixture
def engine():
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture
def gateway(engine, tmp_path):
    """A gateway that takes attempt keys only."""
    with RunningGateway(engine, tmp_path / "store.sqlite3", mode="train") as gateway:
        yield gateway
