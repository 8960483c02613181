from __future__ import annotations

import json

import pytest
from fabricate import evaluation, fabricate

from outrider.errors import ConfigError, SetupError
from outrider.reports.history import read_history, share, write_atomically
from outrider.reports.summary import write_summary


def write_lines(run_dir, *records, tail=""):
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records)
    (run_dir / "metrics.jsonl").write_text(text + tail)


def test_reads_a_finished_run(run_dir):
    fabricate(run_dir)
    history = read_history(run_dir)
    assert [record["step"] for record in history.steps] == list(range(1, 9))
    assert [record["name"] for record in history.evals] == ["before", "step-4", "after"]
    assert history.finished
    assert history.problems == ()
    assert history.counts("failures") == {"engine": 2}
    assert history.column("times", "publish") == [1.5] * 8


def test_a_torn_last_line_is_ignored_in_silence_and_a_broken_line_is_told(run_dir):
    step = {"kind": "step", "step": 1, "reward_mean": 0.5}
    write_lines(run_dir, step, "{broken", '"no object"', {**step, "step": 2}, tail='{"kind":"step","step":3,"rew')
    (run_dir / "config.json").write_text("{}")
    history = read_history(run_dir)
    assert [record["step"] for record in history.steps] == [1, 2]
    assert history.problems == ("metrics.jsonl: 1 broken line(s) left out, the first is line 2.",)


def test_a_step_that_a_resumed_run_repeated_counts_once_and_the_newest_wins(run_dir):
    write_lines(run_dir, *({"kind": "step", "step": s, "loss": loss} for s, loss in [(1, 1.0), (2, 2.0), (2, 3.0)]))
    assert read_history(run_dir).column("loss") == [1.0, 3.0]


def test_numbers_that_are_no_numbers_are_gaps(run_dir):
    write_lines(run_dir, '{"kind":"step","step":1,"loss":NaN}', {"kind": "step", "step": 2, "loss": "x"})
    assert read_history(run_dir).column("loss") == [None, None]


def test_missing_files_are_told(run_dir):
    run_dir.mkdir()
    history = read_history(run_dir)
    assert not history.finished
    assert "config.json is missing." in history.problems
    assert any(problem.startswith("metrics.jsonl is missing") for problem in history.problems)
    with pytest.raises(ConfigError, match="no such run folder"):
        read_history(run_dir / "nowhere")


def test_an_after_of_a_run_that_got_more_steps_since_is_not_the_end(run_dir):
    fabricate(run_dir, steps=4, wanted=8, after=True)
    history = read_history(run_dir)
    assert not history.finished
    assert history.after["name"] == "after"


def test_before_and_after_come_from_the_summary_where_the_metrics_lack_them(run_dir):
    write_lines(run_dir)
    one = {"greedy": {"success": 0.5, "n": 10, "low": 0.2, "high": 0.8}}
    write_summary(
        run_dir, before=one, after=None, wall_s=1.0, peak_rss_bytes=1, seed=0, model="m", steps=0
    )  # fmt: skip
    history = read_history(run_dir)
    assert share(history.before, "greedy").value == 0.5
    assert history.after is None
    assert share(history.before, "sampled") is None


def test_a_measurement_of_nothing_is_none():
    assert share({"greedy": {"success": 0.0, "n": 0, "low": 0.0, "high": 1.0}}, "greedy") is None
    assert share({"greedy": None}, "greedy") is None
    assert share(None, "greedy") is None


def test_what_was_measured_on_says_tries_where_a_task_had_several():
    def base(**counts):
        return share({"sampled": {"success": 0.5, **counts}}, "sampled").base

    assert base(n=200, tasks=200) == "200 tasks"
    assert base(n=800, tasks=200) == "800 tries of 200 tasks"
    assert base(n=800) == "800 tries"  # the record of an older run


def test_summary_holds_the_agreed_keys_and_no_more(run_dir):
    run_dir.mkdir()
    record = evaluation("before", 0, 0.69, 0.16, 41.0)
    path = write_summary(
        run_dir,
        before=record,
        after=record,
        wall_s=712.5,
        peak_rss_bytes=5 * 10**9,
        seed=3,
        model="package:m",
        steps=8,
        best={"name": "step-4", "step": 4, "policy_version": 3, "score": [0.8, 0.7], "path": "best"},
    )
    content = json.loads(path.read_text())
    assert list(content) == ["before", "after", "wall_s", "peak_rss_bytes", "seed", "model", "steps", "best"]
    assert content["best"] == {"name": "step-4", "step": 4, "policy_version": 3, "score": [0.8, 0.7]}
    assert set(content["after"]) == {"greedy", "sampled"}
    assert set(content["after"]["sampled"]) == {"success", "n", "low", "high"}
    assert content["before"]["greedy"]["success"] == 0.69
    assert [entry.name for entry in run_dir.iterdir()] == ["summary.json"]


def test_a_failed_write_leaves_the_old_file_and_no_remains(run_dir, monkeypatch):
    run_dir.mkdir()
    target = run_dir / "report.html"
    target.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outrider.reports.history.os.fsync", full)
    with pytest.raises(SetupError, match="No space left on device"):
        write_atomically(target, b"new")
    assert target.read_text() == "old"
    assert [entry.name for entry in run_dir.iterdir()] == ["report.html"]
