"""Harness files in a folder, and executors over it."""

import pytest

from executors.harness_bench import Bench


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    for executor in bench.executors:
        executor.close()
