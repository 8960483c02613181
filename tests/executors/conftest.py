"""Harness files in a folder, and executors over it."""

import signal

import pytest

from executors.harness_bench import Bench


@pytest.fixture(autouse=True)
def usual_signals():
    """A background job of a shell script ignores Ctrl-C, and so do the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for executor in bench.executors:
        executor.close()
