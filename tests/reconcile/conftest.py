"""A reconciler over a scripted executor and a real store."""

import threading

import pytest

from fakes.scripted_executor import OK, Listener, Script
from outrider.reconcile import Reconciler
from outrider.stores.sqlite import SqliteStore


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "store.sqlite3", synchronous="NORMAL")
    yield store
    store.close()


@pytest.fixture
def make(store, tmp_path):
    def make(ends=lambda attempt_id: OK, reward=lambda episode: 1.0, **changes):
        settings = {
            "store": store,
            "executor": Script(store, ends),
            "reward": reward,
            "reward_name": "test",
            "env_for_key": lambda key: {"KEY": key},
            "workdir": tmp_path / "work",
            "observer": Listener(),
            "concurrency": 4,
            "max_attempts": 3,
            "reward_timeout_s": 30.0,
            "stop": threading.Event(),
        }
        return Reconciler(**settings | changes)

    return make
