"""The schedules that carry rollouts over, whole: real processes, the tiny model, rollouts of unequal length."""

import json
from collections import Counter

import pytest

from fakes.tiny_run import AGENT, finish, start
from outrider.stores import open_store
from outrider.types import CallState, RolloutState

pytestmark = pytest.mark.slow

STEPS, GROUPS, SIZE = 4, 2, 4
SLEEP = "import time, zlib\ntime.sleep(zlib.crc32(sys.argv[1].encode()) % 5 / 2)\n"
UNEVEN = AGENT.replace("client = OpenAI()", SLEEP + "client = OpenAI()")


def test_an_evaluation_in_the_folder_of_a_training_run_measures_the_model_as_version_0(project):
    """Its calls say so, though the store knows of newer versions."""
    status, output = finish(start(project, "train.steps=1"))
    assert status == 0, output
    status, output = finish(start(project, "train.steps=1", command="eval"))
    assert status == 0, output
    store = open_store(f"sqlite:///{project / 'run' / 'store.sqlite3'}")
    attempts = [one.attempt_id for one in store.rollouts() if one.split.startswith("eval/")]
    calls = [call for attempt in attempts for call in store.calls(attempt)]
    assert store.calls_after(0)
    store.close()
    assert calls
    assert {(call.version_start, call.version_end, call.fidelity.value) for call in calls} == {(0, 0, "exact")}


@pytest.mark.parametrize("schedule", ["collocated", "disaggregated"])
def test_a_run_that_carries_over_is_whole(project, schedule):
    (project / "agent.py").write_text(UNEVEN)
    status, output = finish(
        start(project, f"train.schedule={schedule}", f"train.steps={STEPS}", "train.max_staleness=1")
    )
    assert status == 0, output
    records = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert all(record["rollouts"] == GROUPS * SIZE for record in steps)  # groups stay whole
    before = 0
    for record in steps:
        assert before - record["oldest_version"] <= 1, "a token was staler than allowed"
        before = record["policy_version"]
    store = open_store(f"sqlite:///{project / 'run' / 'store.sqlite3'}")
    rollouts = store.rollouts(split="train")
    trained = Counter(r.state for r in rollouts)[RolloutState.SUCCEEDED]
    calls = store.calls_after(0, limit=10_000)
    assert not [call.fidelity_reason for call in calls if call.fidelity_reason.startswith("versions")]
    swapped = [call for call in calls if call.state is CallState.COMPLETE and call.version_start != call.version_end]
    assert all(choice.versions for call in swapped for choice in call.choices), "the engine knows each token's"
    store.close()
    assert trained >= STEPS * GROUPS * SIZE
    dropped = sum(n for record in steps for why, n in record["excluded"].items() if why.startswith("group: over"))
    admitted = {r.group_id for r in rollouts}
    assert len(admitted) <= (STEPS + 1) * GROUPS + dropped, "more was admitted than staleness allows"
