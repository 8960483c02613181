"""Choices of the run file that change what a step learns, whole: real processes, the tiny model."""

import json

import pytest

from fakes.tiny_run import finish, start

pytestmark = pytest.mark.slow


def steps(project) -> list[dict]:
    records = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def test_one_rollout_a_task_with_a_running_baseline_that_a_restart_keeps(project):
    options = [
        "train.advantage=reinforce_running",
        "train.group_size=1",
        "train.groups=6",
        "train.loss=sapo",
        'train.correction=["geometric", "token_tis"]',
        "train.geometric_low=0.5",
        "train.geometric_high=2.0",
        "train.entropy_coef=0.01",
        "eval.limit=1",
    ]
    for until in (1, 2):
        status, output = finish(start(project, *options, f"train.steps={until}"))
        assert status == 0, output
    first, second = steps(project)
    for record in (first, second):
        assert record["tokens"]
        assert not record["update_skipped"]
        assert 0 < record["mismatch"]["effective"] <= 1
        assert record["ratio_mean"] == pytest.approx(1.0, abs=1e-3)  # to the trainer's own log-probs, not the engine's
    decayed, weight = 0.9 * first["reward_baseline"][0], 0.9 * first["reward_baseline"][1]
    assert second["reward_baseline"][0] == pytest.approx(decayed + 0.1 * second["reward_mean"])
    assert second["reward_baseline"][1] == pytest.approx(weight + 0.1)


def test_a_mismatch_stops_the_run_with_a_clear_message(project):
    options = ["train.kl_coef=0.1", "train.kl_in=reward", "train.kl=k1", "train.stop_on_mismatch=1e-9", "eval.limit=1"]
    status, output = finish(start(project, *options))
    assert status != 0
    assert "step 1: engine and trainer disagree by" in output
    assert "train.stop_on_mismatch is 1e-09" in output
    assert not (project / "run" / "weights" / "v0001").exists()
