"""How attempts end: by themselves, killed, or lost with the process that ran them."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from executors.harness_bench import PATIENCE_S, collect, fork_server, gone, one, read_pid, wait_until
from outrider.config import HarnessConfig
from outrider.executors.forkserver import kill_group
from outrider.executors.local import LocalExecutor
from outrider.protocols import Executor

SLEEP = "import time\ntime.sleep(600)"
TRAINER = """
import sys
from pathlib import Path
from outrider.config import HarnessConfig
from outrider.executors.local import LocalExecutor
from outrider.protocols import Launch
from outrider.types import Task

root = Path(sys.argv[1])
executor = LocalExecutor(HarnessConfig(command=("python", "agent.py")), root=root)
executor.start(Launch(attempt_id="a", task=Task(id="t", fields={}), env={}, workdir=root / "w"))
executor.poll(600)
"""


def test_it_is_an_executor(tmp_path):
    executor: Executor = LocalExecutor(HarnessConfig(command=("true",)), root=tmp_path)
    assert executor.poll(0) == []
    executor.close()


def test_a_program_that_is_no_python(bench):
    found = bench.run("sh", "-c", "echo out; echo err >&2; pwd; exit 3")
    assert (found.exit_code, found.signal, found.stderr_tail) == (3, None, "err\n")
    assert found.stdout_tail == f"out\n{bench.root / 'work' / 'a1'}\n"
    assert (found.timed_out, found.lost, found.not_found, found.cancelled) == (False, False, False, False)
    assert found.cpu_s is not None
    assert 0 < found.duration_s < 60


def test_a_program_starts_with_the_usual_signals(bench):
    """Python ignores SIGPIPE; inherited, that turns the quiet end of a pipeline into an error message."""
    found = bench.run("sh", "-c", "yes | head -n 1")
    assert (found.stdout_tail, found.stderr_tail) == ("y\n", "")


def test_a_program_beside_the_run_file_and_its_files(bench):
    bench.write("bin/run.sh", '#!/bin/sh\ncat "$1"; echo "$2"').chmod(0o755)
    bench.write("data.txt", "data\n")
    assert bench.run("bin/run.sh", "data.txt", "{q}", fields={"q": "data.txt"}).stdout_tail == "data\ndata.txt\n"


def test_a_fixed_working_directory(bench):
    bench.write("app/here.txt", "here\n")
    assert bench.run("cat", "here.txt", cwd="app").stdout_tail == "here\n"


def test_stdin_is_empty_unless_given(bench):
    assert bench.run("cat").stdout_tail == ""
    bench.root = bench.root / "second"
    bench.root.mkdir()
    assert bench.run("cat", stdin="Q: {q}\r\n", fields={"q": "ü"}).stdout_tail == "Q: ü\r\n"


def test_standard_output_is_a_tail(bench):
    """50 MB of bytes that are no text, on both streams."""
    found = bench.script(
        """
        import sys
        block = bytes(range(256)) * 4096
        for stream in (sys.stdout.buffer, sys.stderr.buffer):
            for _ in range(50):
                stream.write(block)
            stream.write(b"\\xffthe end")
        """.replace("\n        ", "\n")
    )
    assert found.exit_code == 0
    for text in (found.stdout_tail, found.stderr_tail):
        assert text.endswith("\ufffdthe end")
        assert len(text) <= 8192


def test_killed_by_a_signal(bench):
    found = bench.run("sh", "-c", "kill -SEGV $$")
    assert (found.exit_code, found.signal, found.timed_out) == (None, signal.SIGSEGV, False)


def test_a_memory_limit(bench):
    found = bench.script("x = bytearray(2_000_000_000)", memory_mb=1000)
    assert found.exit_code == 1
    assert "MemoryError" in found.stderr_tail


def test_what_a_harness_leaves_running_is_killed(bench):
    found = bench.run("sh", "-c", "sleep 600 & echo $! > pid; exit 0")
    assert found.exit_code == 0
    pid = read_pid(bench.root / "work" / "a1" / "pid")
    wait_until(lambda: gone(pid))


def test_stop_kills_the_group(bench):
    executor = bench.executor("sh", "-c", "trap '' TERM; sleep 600 & echo $! > pid; wait")
    workdir = bench.start(executor)
    pid = read_pid(workdir / "pid")
    executor.stop("a1")
    found = one(executor)
    assert (found.cancelled, found.signal, found.timed_out, found.lost) == (True, signal.SIGKILL, False, False)
    wait_until(lambda: gone(pid))
    executor.stop("a1")  # of one that has ended: harmless


def test_a_child_without_a_group_of_its_own_yet_is_killed(bench):
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            kill_group(process.pid, signal.SIGKILL)
            assert process.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            process.kill()


def test_stop_at_once(bench):
    executor = bench.executor("sleep", "600")
    for i in range(30):
        bench.start(executor, f"a{i}")
        executor.stop(f"a{i}")
    assert all(found.cancelled and found.signal == signal.SIGKILL for found in collect(executor, 30))


def test_many_at_once_each_reported_once(bench):
    bench.write("agent.py", "import sys\nprint(sys.argv[1])\nsys.exit(int(sys.argv[1]) % 5)")
    executor = bench.executor("python", "agent.py", "{n}")
    for i in range(100):
        bench.start(executor, f"a{i}", n=i)
    found = {exit.attempt_id: exit for exit in collect(executor, 100)}
    assert len(found) == 100
    for i in range(100):
        assert (found[f"a{i}"].stdout_tail, found[f"a{i}"].exit_code) == (f"{i}\n", i % 5)
    assert executor.poll(0.05) == []


def test_a_lost_fork_server_is_told_and_replaced(bench):
    """Its children die with it, their own children too; the next attempt gets a new server."""
    executor = bench.executor("sh", "-c", "sleep 600 & echo $! > pid; if [ {n} = 1 ]; then wait; fi")
    workdirs = [bench.start(executor, f"a{i}", n=1) for i in range(3)]
    pids = [read_pid(workdir / "pid") for workdir in workdirs]
    server = fork_server()
    leaders = [child.pid for child in server.children()]
    assert len(leaders) == 3
    server.kill()
    for found in collect(executor, 3):
        assert (found.lost, found.timed_out, found.not_found, found.cancelled) == (True, False, False, False)
        assert "SIGKILL" in found.reason
    for pid in (*pids, *leaders):
        wait_until(lambda pid=pid: gone(pid))
    bench.start(executor, "again", n=0)
    assert one(executor).exit_code == 0
    assert fork_server().pid != server.pid


def test_a_fork_server_that_cannot_start_says_why(bench):
    bench.write("bad.py", "import os, sys\nsys.stderr.write('no licence')\nsys.stderr.flush()\nos._exit(7)")
    found = bench.script("print(1)", preload=("bad",))
    assert found.lost
    assert "exit status 7" in found.reason
    assert "no licence" in found.reason


def test_a_missing_harness_is_told_from_a_failing_one(bench, monkeypatch):
    """What vanishes after `validate`."""
    monkeypatch.setenv("PATH", os.defpath)  # with a folder that may not be read, the system says something else
    found = bench.run("no-such-program-anywhere")
    assert (found.not_found, found.exit_code, found.lost) == (True, 127, False)
    assert found.reason == "harness.command: no-such-program-anywhere: No such file or directory"
    assert not bench.executor("sh", "-c", "exit 127").poll(0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"command": ("python", "agnt.py")}, "there is no script"),
        ({"command": ("python", "-m", "no_such_module_x")}, "has no module 'no_such_module_x'"),
        ({"command": ("venv/bin/python", "agent.py")}, "venv/bin/python does not exist"),
        ({"function": "nowhere_x:main"}, "no module 'nowhere_x'"),
        ({"function": "mod:man"}, "module 'mod' has no function 'man'"),
        ({"function": "mod:NAME"}, "module 'mod' has no function 'NAME'"),
    ],
)
def test_not_found_when_it_runs(bench, config, said):
    bench.write("mod.py", "NAME = 1\ndef main(task): ...")
    found = bench.run(*config.pop("command", ()), **config)
    assert found.not_found
    assert said in found.reason


def test_a_status_of_127_is_the_harness_s_own(bench):
    found = bench.run("sh", "-c", "exit 127")
    assert (found.exit_code, found.not_found) == (127, False)


def test_close_kills_everything(bench):
    executor = bench.executor("sh", "-c", "trap '' TERM; sleep 600 & echo $! > pid; echo $$ > leader; wait")
    workdirs = [bench.start(executor, f"a{i}") for i in range(3)]
    pids = [read_pid(workdir / name) for workdir in workdirs for name in ("pid", "leader")]
    server = fork_server()
    executor.close()
    for pid in (*pids, server.pid):
        wait_until(lambda pid=pid: gone(pid))
    assert all(found.cancelled and not found.lost for found in collect(executor, 3))
    executor.close()
    bench.start(executor, "late")
    late = one(executor)
    assert late.lost
    assert "closed" in late.reason


def test_killing_the_parent_kills_everything(bench):
    """-9 on the trainer: no harness may go on calling the model."""
    bench.write(
        "agent.py",
        "import subprocess, os\np = subprocess.Popen(['sleep', '600'])\n"
        "open('pid', 'w').write(f'{p.pid}\\n')\nopen('leader', 'w').write(f'{os.getpid()}\\n')\np.wait()",
    )
    (bench.root / "w").mkdir()
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(bench.root)]) as process:
        pids = [read_pid(bench.root / "w" / name) for name in ("pid", "leader")]
        server = psutil.Process(process.pid).children()[0].pid
        process.kill()
    for pid in (*pids, server):
        wait_until(lambda pid=pid: gone(pid))


def test_the_fork_server_survives_the_thread_that_started_it(bench):
    """Linux counts that thread as the parent whose death is signalled."""
    executor = bench.executor("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; echo done")

    def start():
        bench.start(executor)
        wait_until(lambda: fork_server().children())

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    server = fork_server()
    bench.start(executor, "a2")
    for attempt in ("a1", "a2"):
        (bench.root / "work" / attempt / "go").touch()
    assert [found.stdout_tail for found in collect(executor, 2)] == ["done\n", "done\n"]
    assert fork_server().pid == server.pid


def test_an_interpreter_of_the_harness_s_own(bench, monkeypatch):
    """Another Python than ours, as a harness with a virtual environment has, without Outrider in it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # whoever runs the tests may have set it to our sources
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bench.root / ".venv")], check=True)
    bench.write("agent.py", "import sys\nprint(sys.prefix)\nimport outrider")
    found = bench.run(".venv/bin/python", "agent.py")
    assert found.stdout_tail == f"{bench.root / '.venv'}\n"
    assert "No module named 'outrider'" in found.stderr_tail
