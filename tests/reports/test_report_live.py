from __future__ import annotations

import io
import re
import threading

import pytest
from fabricate import HOSTILE, evaluation, step_record
from rich.console import Console

from outrider.reports.live import LiveView, draw
from outrider.reports.progress import Progress, learning_words, step_words
from outrider.types import Failure, Rollout, Task


class Terminal(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.flushed_to = 0

    def isatty(self) -> bool:
        return self.is_terminal

    def flush(self) -> None:
        self.flushed_to = len(self.getvalue())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fixed:
    """Stands in for `random.Random`, so that figures are the same each time."""

    def gauss(self, *_):
        return 0.0

    def random(self):
        return 0.5

    def randint(self, low, _):
        return low


def rollout(reward=1.0, attempt=1, failure=Failure.NONE):
    return Rollout(
        id="r", task=Task(id="t", fields={}), group_id="g", reward=reward, attempt=attempt, failure=failure
    )  # fmt: skip


def shown(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(draw(progress, "a run"))
    return console.file.getvalue()


def watch(view: LiveView, clock: Clock) -> None:
    view.phase("evaluate before", 4)
    for _ in range(4):
        view.advance(rollout())
    view.record(evaluation("before", 0, 0.69, 0.16, 41.0))
    view.phase("step 4: rollouts", 64)
    clock.now += 31
    view.advance(rollout(0.4, attempt=2))
    view.advance(rollout(None, attempt=3, failure=Failure.ENGINE))
    view.record(step_record(4, 8, Fixed()))
    view.message(f"gateway started again {HOSTILE}")


def test_without_a_terminal_there_are_plain_flushed_lines():
    stream, clock = Terminal(is_terminal=False), Clock()
    with LiveView(steps=8, title="Run", console=Console(file=stream), clock=clock) as view:
        watch(view, clock)
        assert stream.flushed_to == len(stream.getvalue())
    lines = stream.getvalue().splitlines()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", stream.getvalue())
    assert lines[0] == "[00:00:00] Run"
    assert lines[1] == "[00:00:00] evaluate before: 4 to do"
    assert lines[2] == "[00:00:00] before: greedy 69% (62.3–75) n 200, sampled 16% (11.6–21.7) n 200"
    assert lines[3] == "[00:00:00] step 4: rollouts: 64 to do"
    assert lines[4].startswith("[00:00:31] step 4: rollouts: 1/64")  # a sign of life in a long phase
    assert re.match(r"\[00:00:31\] step 4/8  reward 0\.\d\d ± 0\.\d\d  success [\d.]+%  loss", lines[5])
    assert "excluded: zero variance group 1  failures: engine 2" in lines[5]
    assert lines[6].startswith("[00:00:31] gateway started again <script>")
    assert len(lines) == 7


def test_what_an_earlier_start_did_is_not_told_as_new():
    stream = Terminal(is_terminal=False)
    with LiveView(steps=8, console=Console(file=stream), clock=Clock()) as view:
        view.record(step_record(3, 8, Fixed()), earlier=True)
        view.record(evaluation("before", 0, 0.69, 0.16, 41.0), earlier=True)
        view.record(step_record(4, 8, Fixed()))
    told = [line.removeprefix("[00:00:00] ") for line in stream.getvalue().splitlines()]
    assert [line[: line.index("  ")] for line in told[::2]] == ["done earlier: step 3/8", "step 4/8"]
    assert told[1].startswith("done earlier: before: greedy")


def test_rows_of_earlier_steps_are_dim():
    progress = Progress(steps=8, success=1.0)
    for step in (3, 4, 5):
        progress.add(step_record(step, 8, Fixed()), earlier=step < 5)
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard", _environ={})
    console.print(draw(progress, "a run"))
    rows = [line for line in console.file.getvalue().splitlines() if "±" in line]
    assert ["\x1b[2m" in row for row in rows] == [True, True, False]


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_ci_log_gets_no_control_codes_whatever_the_environment_claims(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    stream, clock = Terminal(is_terminal=False), Clock()
    with LiveView(steps=8, console=Console(file=stream), clock=clock) as view:
        watch(view, clock)
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_picture_and_keeps_its_cursor():
    stream, clock = Terminal(is_terminal=True), Clock()
    view = LiveView(steps=8, console=Console(file=stream, force_terminal=True, width=120, _environ={}), clock=clock)
    with view:
        begun = stream.getvalue()
        assert begun.rfind("\x1b[?25h") > begun.rfind("\x1b[?25l")
        watch(view, clock)
    assert "zero variance group 1" in stream.getvalue()
    left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())  # the view's own sequences
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", left)


def test_ctrl_c_leaves_the_terminal_as_it_was():
    stream = Terminal(is_terminal=True)
    before = set(threading.enumerate())
    view = LiveView(steps=8, console=Console(file=stream, force_terminal=True, _environ={}))

    def interrupted():
        with view:
            view.phase("step 1: rollouts", 8)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    view.close()  # a second time, as a second Ctrl-C would
    assert "step 1: rollouts" in stream.getvalue()
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_the_drawing_thread_never_waits_for_ever():
    """A signal handler may close the view while its own thread holds the lock."""
    view = LiveView(steps=8, console=Console(file=Terminal(is_terminal=True), force_terminal=True), live=True)
    with view._lock:
        drawer = threading.Thread(target=view._picture, daemon=True)
        drawer.start()
        drawer.join(timeout=60)
        assert not drawer.is_alive()


def test_a_broken_pipe_ends_no_run():
    class Broken(Terminal):
        def write(self, _):
            raise BrokenPipeError

    clock = Clock()
    with LiveView(steps=8, console=Console(file=Broken(is_terminal=False)), clock=clock) as view:
        watch(view, clock)
    assert view._silent


def test_failures_are_counted_once_whether_or_not_a_record_counts_them():
    progress = Progress(steps=8, success=1.0)
    progress.begin("step 1: rollouts", 3)
    progress.advance(rollout(None, attempt=2, failure=Failure.ENGINE))
    assert progress.all_failures() == {"engine": 1}
    progress.add({"kind": "step", "step": 1, "failures": {"engine": 3, "gateway": 1}})
    assert progress.all_failures() == {"engine": 3, "gateway": 1}
    progress.advance(rollout(None, failure=Failure.NO_CALLS))
    progress.add({"kind": "eval", "name": "after", "step": 1})
    assert progress.all_failures() == {"engine": 3, "gateway": 1, "no_calls": 1}
    assert progress.retries == 1


def test_nothing_is_silent_in_the_picture():
    progress = Progress(steps=8, success=1.0)
    assert "failures: none   retries: 0   excluded: none" in shown(progress)
    progress.begin("step 1: rollouts", 64)
    progress.advance(rollout(0.5))
    progress.advance(rollout(None, attempt=3, failure=Failure.REWARD_INVALID))
    progress.add({"kind": "step", "step": 1, "excluded": {"zero_variance": 2}, "groups": 8, "groups_trained": 6})
    picture = shown(progress)
    assert "2/64" in picture
    assert "without reward 1" in picture
    assert "failures: reward invalid 1   retries: 2   excluded: zero variance 2" in picture
    assert "6/8" in picture


def test_held_out_rollouts_without_reward_are_told():
    progress = Progress(steps=8, success=1.0)
    record = evaluation("before", 0, 0.5, 0.5, 1.0)
    record["greedy"]["unscored"] = 3
    progress.add(record)
    assert "greedy without reward 3" in shown(progress)
    progress.add({"kind": "eval", "name": "after", "step": 8})
    assert "nothing measured" in shown(progress)


def test_time_left_is_the_steps_left_and_the_last_evaluation():
    clock = Clock()
    progress = Progress(steps=4, success=1.0, clock=clock)
    assert progress.left_s() is None
    progress.begin("evaluate before", 10)
    clock.now += 40
    progress.add(evaluation("before", 0, 0.5, 0.5, 40.0))
    progress.begin("step 1: rollouts", 8)
    clock.now += 30
    progress.add({"kind": "step", "step": 1, "times": {"total": 30.0}})
    assert progress.left_s() == 3 * 30 + 40
    progress.begin("step 2: rollouts", 8)
    clock.now += 10
    progress.advance(rollout())
    assert progress.left_s() == 3 * 30 + 40 - 10
    assert progress.phase.left_s(clock.now) == 70
    for step in (2, 3, 4):
        progress.add({"kind": "step", "step": step, "times": {"total": 30.0}})
    progress.add(evaluation("after", 4, 0.5, 0.5, 40.0))
    assert progress.left_s() == 0


def test_a_phase_of_unknown_length_has_no_time_left():
    progress = Progress(steps=0, success=1.0)
    progress.begin("waiting", 0)
    progress.advance(None)
    assert progress.phase.left_s(progress.clock()) is None
    picture = shown(progress)
    assert "waiting" in picture
    assert "0/0" not in picture


def test_what_to_keep_an_eye_on_is_told_where_it_is_used():
    record = step_record(4, 8, Fixed())
    assert learning_words(record) == ["engine − trainer 0.0125 nats (max 0.23)"]
    record |= {"mismatch": {"weight_mean": 1.25, "masked": 0.5}, "value_loss": 0.75, "value_explained_variance": -0.5}
    words = ["weight 1.25 masked 50%", "value loss 0.75 explains -0.5"]
    assert learning_words(record)[1:] == words
    progress = Progress(steps=8, success=1.0)
    progress.add(record)
    for part in words:
        assert part in step_words(record, 8)
        assert part in shown(progress)
    assert learning_words({"kind": "step", "step": 5, "skipped": True}) == []
