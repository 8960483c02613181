"""What goes wrong around a run: the message, the exit code, and that the folder can be resumed. On a tiny model."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time

import pytest

from fakes.tiny_run import AGENT, TIMEOUT_S, finish, start

pytestmark = pytest.mark.slow


def resumes(project):
    """The same command ends well."""
    status, output = finish(start(project))
    assert status == 0, output
    summary = json.loads((project / "run" / "summary.json").read_text())
    assert summary["after"]["greedy"]["n"] == 2
    steps = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["kind"] == "step"] == [1, 2]


@pytest.mark.parametrize(
    ("agent", "limit_s", "said"),
    [
        ("import sys; sys.exit('no licence key')", 60.0, "no licence key"),  # exits at once
        ("import time; time.sleep(600)", 2.0, "never called the model (timed out)"),  # hangs
        ("import os; os.write(1, bytes(range(256)) * 100)", 60.0, "never called the model (exit status 0"),  # garbage
        ("def broken(:\n", 60.0, "SyntaxError"),
    ],
)
def test_a_harness_that_never_calls_the_model(project, agent, limit_s, said):
    (project / "agent.py").write_text(agent)
    status, output = finish(start(project, f"harness.timeout_s={limit_s}"))
    assert status == 4, output
    assert said in output
    assert "no_calls" in output
    assert "the same command goes on from there" in output


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("def even(episode):\n    raise KeyError('answer')\n", "raised KeyError: 'answer'"),
        ("def even(episode):\n    return float('nan')\n", "returned nan"),
    ],
)
def test_a_reward_that_cannot_tell(project, reward, said):
    (project / "odd_or_even.py").write_text(reward)
    status, output = finish(start(project))
    assert status == 4, output
    assert said in output


def test_a_port_in_use(project):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, output = finish(start(project, f"gateway.port={taken.getsockname()[1]}"))
    assert status == 3, output
    assert "gateway.port: cannot listen on" in output


def test_a_full_disk(project):
    # A limit on the size of files is what a full disk looks like to whoever writes them, and needs no root.
    limit = 60_000
    status, output = finish(start(project, preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
    assert status in (3, 4), output
    assert "run" in output
    resumes(project)


def test_ctrl_c_twice_leaves_at_once_and_nothing_behind(project):
    (project / "agent.py").write_text("import time\n" + AGENT + "time.sleep(120)\n")
    process = start(project, "harness.timeout_s=60.0")
    work = project / "run" / "work"
    deadline = time.monotonic() + TIMEOUT_S
    while not (work.exists() and any(work.glob("*.stdout"))):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGINT)
    status, output = finish(process)
    assert status == 130, output
    (project / "agent.py").write_text(AGENT)
    resumes(project)
