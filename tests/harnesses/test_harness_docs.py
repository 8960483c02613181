"""docs/harnesses.md says of each harness what the catalog does with it."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

import pytest

from harnesses.catalog import HARNESSES, Dialect, Harness
from harnesses.drive import API_KEY

PAGE = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text(encoding="utf-8")
WORDS = {"url": "http://gateway/s/KEY", "key": API_KEY}
SET = {
    Dialect.CHAT: "OPENAI_BASE_URL",
    Dialect.RESPONSES: "OPENAI_BASE_URL",
    Dialect.MESSAGES: "ANTHROPIC_BASE_URL",
}


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_a_harness_has_its_settings_in_the_docs(harness: Harness) -> None:
    (row,) = re.findall(rf"^\| {re.escape(f'{harness.name} {harness.version}')} \|(.*)\|$", PAGE, re.M)
    variables = {SET[variant.dialect] for variant in harness.variants} if harness.name != "codex" else set()
    first = row.partition("|")[0].strip()
    assert first == {0: "none", 1: f"`{next(iter(variables), '')}`", 2: "both"}[len(variables)]
    assert harness.needs in row
    for name in [*harness.env, *(name for variant in harness.variants for name in variant.env)]:
        assert name in row, f"{name} is set by the catalog and not told"


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
def test_its_files_stand_in_the_docs_as_they_are_tested(harness: Harness) -> None:
    for variant in harness.variants:
        for name, text in variant.files.items():
            assert f"\n{Template(text).substitute(WORDS).strip()}\n```" in PAGE, name


def test_each_way_that_is_run_has_its_row_of_figures() -> None:
    for harness in HARNESSES:
        for variant in harness.variants:
            label = f" ({variant.label})" if variant.label else ""
            row = f"| {harness.name} | {variant.dialect.value}{label} | {'yes' if variant.streamed else 'no'} |"
            assert PAGE.count(row) == 1, row
