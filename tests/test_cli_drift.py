"""`outrider drift` on a run folder."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from fakes.calls import call
from outrider.cli import main
from outrider.config import parse
from outrider.stores.sqlite import SqliteStore
from outrider.types import Rollout, RolloutState, Task

TREE = {"tasks": {"train": "tasks.jsonl"}, "harness": {"command": ["agent"]}}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(msgspec.to_builtins(parse(TREE))))
    store = SqliteStore(tmp_path / "store.sqlite3", synchronous="NORMAL")
    for step in (1, 2):
        rollout = Rollout(
            id=f"r{step}",
            task=Task(id="t", fields={}),
            group_id="g",
            step=step,
            state=RolloutState.SUCCEEDED,
            attempt=2,
            reward=1.0,
        )
        store.add_rollouts([rollout])
        store.append_call(call([1, 10], [20, 2], id=f"{step}-dead", attempt_id=f"r{step}.a1")).result(30)
        store.append_call(call([1, 10], [20, 2], id=f"{step}-1", attempt_id=f"r{step}.a2")).result(30)
        broken = call(
            [1, 10, 29, 2, 11], [21], id=f"{step}-2", attempt_id=f"r{step}.a2", continuation="broke: tools changed"
        )
        store.append_call(broken).result(30)
    store.add_rollouts([Rollout(id="waiting", task=Task(id="t", fields={}), group_id="g", step=2)])
    store.close()
    return tmp_path


def drift(*args):
    result = CliRunner().invoke(main, ["drift", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_attempts_that_count_are_summed_up(folder):
    report = json.loads(drift(folder, "--json"))
    assert (report["rollouts"], report["calls"], report["breaks"], report["recomputed_tokens"]) == (2, 4, 2, 4)
    assert json.loads(drift(folder, "--json", "--step", 1))["rollouts"] == 1
    assert json.loads(drift(folder, "--json", "--split", "after/greedy"))["calls"] == 0


def test_the_table_names_the_cause(folder):
    assert "tools changed: 2 calls, 4 tokens" in drift(folder)
