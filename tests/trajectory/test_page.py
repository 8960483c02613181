"""The example of docs/trajectories.md runs as it stands, and its rules are what the configuration takes."""

import re
import tomllib
from pathlib import Path

from outrider.config import parse

PAGE = Path(__file__).parents[2] / "docs" / "trajectories.md"


def fenced(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    return found


def test_the_example_runs():
    names: dict = {}
    exec(compile(fenced("python"), str(PAGE), "exec"), names)
    assert len(names["rows"].samples) == 3


def test_the_rules_are_taken():
    tree = {"tasks": {"train": "t.jsonl"}, "harness": {"command": ["agent"]}} | tomllib.loads(fenced("toml"))
    assert [rule.name for rule in parse(tree).train.leave_out] == ["title", "quota", "opencode title"]
