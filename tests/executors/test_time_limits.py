"""Attempts that end at their time limit. The clock leaps to it, once the harness is as far as the test wants it."""

import os
import sys

import psutil
import pytest

from executors.harness_bench import gone, one, read_pid, wait_until
from fakes.clock import LeapingClock
from outrider.executors import local

SLEEP = "import time\ntime.sleep(600)"
LIMIT_S = 3600.0


@pytest.fixture
def clock(monkeypatch):
    """What the executor goes by."""
    clock = LeapingClock()
    monkeypatch.setattr(local, "time", clock)
    return clock


@pytest.fixture
def reach_limit(clock):
    def reach_limit(executor):
        wait_until(lambda: all(live.pid for live in executor._live.values()))  # the executor knows that it has begun
        clock.leap(LIMIT_S)
        with executor._changed:
            executor._changed.notify_all()

    return reach_limit


@pytest.fixture
def begin(bench):
    """Starts a Python harness, and returns when it has written its first line."""

    def begin(text):
        bench.write("agent.py", text)
        executor = bench.executor("python", "agent.py", timeout_s=LIMIT_S)
        out = bench.start(executor).with_suffix(".stdout")
        wait_until(lambda: out.exists() and out.read_text().endswith("\n"))
        return executor

    return begin


def test_over_its_time_by_the_clock_on_the_wall(bench):
    found = bench.script(SLEEP, timeout_s=0.5)
    assert found.timed_out
    assert found.reason == "over its time limit of 0.5 s"


def test_over_its_time(begin, reach_limit):
    executor = begin("print('so far', flush=True)\n" + SLEEP)
    reach_limit(executor)
    found = one(executor)
    assert (found.timed_out, found.signal, found.stdout_tail) == (True, 15, "so far\n")
    assert found.reason == "over its time limit of 3600 s"


def test_over_its_time_it_may_clean_up(begin, reach_limit):
    executor = begin(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nprint(1, flush=True)\n"
        + SLEEP
    )
    reach_limit(executor)
    found = one(executor)
    assert (found.timed_out, found.exit_code, found.signal) == (True, 0, None)


def test_over_its_time_and_deaf(begin, reach_limit, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    executor = begin("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\n" + SLEEP)
    reach_limit(executor)
    found = one(executor)
    assert (found.timed_out, found.exit_code, found.signal) == (True, None, 9)


def test_R09_a_pipeline_killed_at_its_time_limit(bench, reach_limit):
    """Whatever status the pipeline ends with, the time limit is on record; and nothing of it lives on."""
    bench.write("a.py", "import os\nopen('pid', 'w').write(f'{os.getpid()}\\n')\nprint('x', flush=True)\n" + SLEEP)
    pipeline = f"trap : TERM; {sys.executable} $0 | tee log; exit 0"
    executor = bench.executor("sh", "-c", pipeline, "a.py", timeout_s=LIMIT_S)
    workdir = bench.start(executor)
    pid = read_pid(workdir / "pid")
    wait_until(lambda: (workdir / "log").exists() and (workdir / "log").read_text() == "x\n")
    reach_limit(executor)
    found = one(executor)
    assert (found.timed_out, found.exit_code) == (True, 0)
    wait_until(lambda: gone(pid))


def test_a_preload_that_hangs_loses_the_attempt(bench, monkeypatch):
    monkeypatch.setattr(local, "START_LIMIT_S", 1.0)
    bench.write("slow.py", SLEEP)
    found = bench.script("print(1)", preload=("slow",))
    assert (found.lost, found.timed_out) == (True, False)


def test_the_time_limit_starts_with_the_harness(bench, clock, monkeypatch):
    """Preloading is ours and takes no time from it."""
    monkeypatch.setattr(local, "START_LIMIT_S", 10 * LIMIT_S)
    go = bench.root / "go"
    bench.write("slow.py", f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)")
    bench.write("agent.py", "print('in time')")
    executor = bench.executor("python", "agent.py", preload=("slow",), timeout_s=LIMIT_S)
    bench.start(executor)
    clock.leap(2 * LIMIT_S)
    go.touch()
    found = one(executor)
    assert (found.timed_out, found.stdout_tail) == (False, "in time\n")


def test_a_fork_bomb_within_reason(bench, reach_limit):
    """A tree of 60 processes, all of them deaf to SIGTERM, is gone after the time limit."""
    bench.write(
        "agent.py",
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for _ in range(60):\n    if os.fork() == 0: time.sleep(600)\n"
        "open('pid', 'w').write(f'{os.getpgid(0)}\\n')\ntime.sleep(600)",
    )
    executor = bench.executor("python", "agent.py", timeout_s=LIMIT_S, memory_mb=2000)
    group = read_pid(bench.start(executor) / "pid")
    reach_limit(executor)
    assert one(executor).timed_out

    def members():
        return [pid for pid in psutil.pids() if _group(pid) == group and not gone(pid)]

    wait_until(lambda: not members())


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.parametrize("slow", [False, True])
def test_time_that_is_held_is_not_the_harnesss(begin, reach_limit, bench, slow):
    """A step of training that holds calls back may take longer than the limit."""
    executor = begin("import os, time\nprint(1, flush=True)\nwhile not os.path.exists('../go'): time.sleep(0.01)")
    executor.hold_time(True)
    executor.hold_time(True)  # a publish within the step says so again
    reach_limit(executor)
    executor.hold_time(False)
    if slow:
        reach_limit(executor)
    else:
        bench.write("work/go", "")
    found = one(executor)
    assert (found.timed_out, found.exit_code) == ((True, None) if slow else (False, 0))
