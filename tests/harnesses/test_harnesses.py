"""Real harnesses, unmodified, through a real gateway. `python -m harnesses.run` does the whole catalog.

A harness that cannot be installed is a failure: an agent that no test starts is an agent that nobody knows to work.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harnesses.bench import Bench
from harnesses.catalog import HARNESSES, Dialect, Harness, Variant
from harnesses.install import install

pytestmark = pytest.mark.harness

# Those that install in seconds. Other dialects join as the gateway learns them.
CHOSEN = {
    "openai": {Dialect.CHAT},
    "openai-agents": {Dialect.CHAT},
    "pydantic-ai": {Dialect.CHAT},
    "smolagents": {Dialect.CHAT},
    "langgraph": {Dialect.CHAT},
    "qwen-code": {Dialect.CHAT},
}


def chosen() -> Iterator[tuple[Harness, Variant]]:
    for harness in HARNESSES:
        for variant in harness.variants:
            if variant.dialect in CHOSEN.get(harness.name, ()):
                yield harness, variant


def name_of(value: Harness | Variant) -> str:
    if isinstance(value, Harness):
        return value.name
    return f"{value.dialect.value}{'-streamed' * value.streamed}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    with Bench(tmp_path_factory.mktemp("harnesses")) as bench:
        yield bench


@pytest.mark.parametrize(("harness", "variant"), list(chosen()), ids=name_of)
def test_a_real_harness_runs_through_the_gateway(bench: Bench, harness: Harness, variant: Variant) -> None:
    outcome = bench.run(harness, variant, install(harness))
    assert outcome.ok, "\n".join([*outcome.problems, outcome.output])
    assert outcome.fidelity == {"exact": outcome.calls}
    assert outcome.samples >= 1
