"""The task set: same bytes from the same seed, and nothing in it that the held-out part has too."""

import json
import re
import subprocess
import sys

import pytest

from outrider.data.tasks import load_tasks


@pytest.fixture
def sets(calc_agent):
    return {name: load_tasks(calc_agent / f"{name}.jsonl", field="tasks") for name in ("train", "heldout")}


def test_regenerating_gives_the_same_bytes(calc_agent, tmp_path):
    subprocess.run([sys.executable, str(calc_agent / "make_tasks.py"), "--out", str(tmp_path)], check=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (calc_agent / name).read_bytes()


def test_another_seed_gives_other_tasks(make_tasks):
    assert make_tasks.generate(0) != make_tasks.generate(1)


def test_no_operand_pair_twice(sets):
    pairs = {name: [frozenset((t.fields["a"], t.fields["b"])) for t in tasks] for name, tasks in sets.items()}
    assert not set(pairs["train"]) & set(pairs["heldout"])
    for found in pairs.values():
        assert len(set(found)) == len(found)
        assert all(len(pair) == 2 for pair in found)


def test_sizes(sets):
    assert len(sets["train"]) == 400
    assert len(sets["heldout"]) >= 200
    for tasks in sets.values():
        for tool in ("add", "subtract", "multiply"):
            assert sum(task.fields["tool"] == tool for task in tasks) > len(tasks) / 5


def test_every_task_is_right(sets):
    for task in (*sets["train"], *sets["heldout"]):
        row = task.fields
        a, b = row["a"], row["b"]
        assert row["answer"] == {"add": a + b, "subtract": a - b, "multiply": a * b}[row["tool"]]
        assert row["answer"] > 0
        assert sorted(map(int, re.findall(r"\d+", row["question"]))) == sorted([a, b])
        assert "{" not in row["question"]


def test_each_template_is_in_both_sets(make_tasks, sets):
    for templates in make_tasks.TEMPLATES.values():
        for template in templates:
            pattern = re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(template)))
            for name, tasks in sets.items():
                assert any(pattern.fullmatch(task.fields["question"]) for task in tasks), (name, template)


def test_fields_are_what_the_files_say(calc_agent):
    row = json.loads((calc_agent / "train.jsonl").read_text().splitlines()[0])
    assert list(row) == ["id", "question", "tool", "a", "b", "answer"]
