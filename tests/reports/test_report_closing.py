"""What a run says when it is done."""

from __future__ import annotations

import os
import shlex
import sys

from fabricate import fabricate

from outrider.cli import main
from outrider.reports.closing import closing_words, program
from outrider.reports.history import History, read_history


def test_a_finished_run_tells_its_result_and_what_to_type_next(run_dir, monkeypatch):
    fabricate(run_dir)
    monkeypatch.chdir(run_dir.parent)
    words = closing_words(read_history(run_dir))
    assert "greedy    69.0% →  91.0%  +22.0 points  on 200 tasks" in words
    assert "8 steps in " in words
    assert "run/report.html" in words
    assert str(run_dir) not in words  # as one would type it from here
    commands = [line[line.index(program()) + len(program()) :] for line in words.splitlines() if program() in line]
    assert len(commands) >= 3
    for command in commands:
        name, *rest = shlex.split(command, comments=True)
        options = {option for param in main.commands[name].params for option in param.opts}
        assert {word for word in rest if word.startswith("--")} <= options


def test_a_run_that_could_not_learn_says_why_and_what_helps(tmp_path):
    idle = {"step": 1, "groups": 4, "groups_trained": 0}
    words = closing_words(History(path=tmp_path, steps=(idle, idle), summary={"wall_s": 5.0}))
    assert "2 of 2 steps had nothing to learn from" in words
    assert "No held-out tasks were measured." in words
    assert "nothing to learn" not in closing_words(History(path=tmp_path, steps=({**idle, "groups_trained": 4},)))


def test_a_program_that_is_not_on_the_path_is_named_by_its_own(tmp_path, monkeypatch):
    script = tmp_path / "venv" / "bin" / "outrider"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    assert program() == "venv/bin/outrider"
    monkeypatch.setenv("PATH", str(script.parent))
    assert program() == "outrider"
    script.unlink()
    assert program() == "venv/bin/python -m outrider"
