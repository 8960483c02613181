"""export, prune and backup from the command line, on a store with calls in it."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fakes.records import make_call
from outrider.cli import main
from outrider.stores import open_store


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path / 'store.sqlite3'}"
    store = open_store(url)
    for number in range(5):
        store.append_call(replace(make_call(f"call-{number}"), attempt_id="attempt", started_at=1.0)).result()
    store.close()
    return url


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_export_writes_a_row_a_call(url, tmp_path):
    result = run("export", url, tmp_path / "calls.jsonl", "--after", 2)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["call-2", "call-3", "call-4"]
    assert "3 calls" in result.output


def test_prune_says_what_it_would_do_and_does_it(url):
    assert "would delete 5 calls of 1 attempts" in run("prune", url, "--older-than", "30d", "--dry-run").output
    assert "deleted 5 calls of 1 attempts" in run("prune", url, "--older-than", "30d").output
    nothing = run("prune", url, "--max-size", "10GB").output
    assert "deleted 0 calls" in nothing
    assert "What always stays" in nothing


@pytest.mark.parametrize(
    ("option", "value"),
    [("--older-than", "30x"), ("--older-than", "1.2.3d"), ("--older-than", "d"), ("--max-size", "10 apples")],
)
def test_a_wrong_unit_is_told(url, option, value):
    result = run("prune", url, option, value)
    assert result.exit_code == 2
    assert "write a number and one of" in result.output


def test_backup_is_a_store(url, tmp_path):
    assert run("backup", url, tmp_path / "copy.sqlite3").exit_code == 0
    store = open_store(f"sqlite:///{tmp_path / 'copy.sqlite3'}")
    assert len(store.calls("attempt")) == 5
    store.close()


@pytest.mark.parametrize("command", [["export", "x.jsonl"], ["prune", "--older-than", "1d"], ["backup", "x.sqlite3"]])
def test_a_store_that_is_not_there_is_told_and_not_made(tmp_path, command):
    name, *rest = command
    result = run(name, f"sqlite:///{tmp_path / 'nope.sqlite3'}", *rest)
    assert result.exit_code == 2
    assert "there is no file" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_url_is_told(tmp_path):
    result = run("export", "mysql://host/db", tmp_path / "x.jsonl")
    assert result.exit_code == 2
    assert "mysql" in result.output
