"""Real harnesses, unmodified, through a real gateway. `python -m harnesses.run` does the whole catalog.

A harness that cannot be installed is a failure: an agent that no test starts is an agent that nobody knows to work.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harnesses.bench import Bench, Setting
from harnesses.catalog import HARNESSES, Harness, Variant
from harnesses.install import install

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1800)]

# Those that install in seconds, in all their variants.
CHOSEN = (
    "openai",
    "anthropic",
    "openai-agents",
    "pydantic-ai",
    "smolagents",
    "langgraph",
    "claude-code",
    "codex",
    "qwen-code",
)
RUNS = [(harness, variant) for harness in HARNESSES if harness.name in CHOSEN for variant in harness.variants]


def name_of(value: Harness | Variant) -> str:
    if isinstance(value, Harness):
        return value.name
    label = "-" + value.label.replace(" ", "-") if value.label else ""
    return f"{value.dialect.value}{'-streamed' * value.streamed}{label}"


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[Bench]:
    """Its model writes tool calls as no serialiser would, so that only its own ids make one row of a conversation."""
    with Bench(tmp_path_factory.mktemp("harnesses"), Setting(turns=4, odd_arguments=True)) as bench:
        yield bench


@pytest.mark.parametrize(("harness", "variant"), RUNS, ids=name_of)
def test_a_real_harness_runs_through_the_gateway(bench: Bench, harness: Harness, variant: Variant) -> None:
    outcome = bench.run(harness, variant, install(harness))
    assert outcome.ok, "\n".join([*outcome.problems, outcome.output])
    assert outcome.fidelity == {"exact": outcome.calls}
    as_one = outcome.prompts.get("opened", 0) + outcome.prompts.get("continued", 0)
    assert outcome.samples == outcome.prompts.get("opened", 0) + (outcome.calls - as_one)
