"""CPU that starting a harness costs per rollout: warm fork server against a plain subprocess.

    python bench/startup.py [--rollouts N]

The harness is the least that an agent on the `openai` SDK does before its first call: import it and make a client. The
server's own share (fork, reaping) and this process's (bookkeeping) count as well; preloading, once a run, is apart.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from outrider.config import HarnessConfig
from outrider.executors.local import LocalExecutor
from outrider.protocols import Launch
from outrider.types import Task

HARNESS = """
from openai import OpenAI
client = OpenAI()
client.chat.completions
"""
# A client made while preloading is thrown away; what it imported on the way stays.
WARM = """
from openai import OpenAI
def client():
    OpenAI().chat.completions
"""
ENV = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "none"}


def forked(folder: Path, rollouts: int) -> dict[str, float]:
    """CPU seconds a rollout by who spent them, and of the server until it was ready."""
    harness = HarnessConfig(command=("python", "harness.py"), preload=("warm:client",), env=ENV)
    executor = LocalExecutor(harness, root=folder)
    try:
        run(executor, folder, "warm-up", 1)
        server = psutil.Process().children()[0]
        ready, own = spent(server), time.process_time()
        child = run(executor, folder, "rollout", rollouts)
        return {
            "child": child / rollouts,
            "server": (spent(server) - ready) / rollouts,
            "executor": (time.process_time() - own) / rollouts,
            "preload, once": ready,
        }
    finally:
        executor.close()


def run(executor: LocalExecutor, folder: Path, name: str, count: int) -> float:
    """CPU seconds of the children, all together."""
    for i in range(count):
        workdir = folder / f"{name}-{i}"
        workdir.mkdir()
        executor.start(Launch(attempt_id=workdir.name, task=Task(id="t", fields={}), env={}, workdir=workdir))
    cpu, ended = 0.0, 0
    while ended < count:
        for found in executor.poll(60):
            if found.exit_code != 0:
                sys.exit(f"{found.attempt_id}: {found.reason}\n{found.stderr_tail}")
            cpu, ended = cpu + (found.cpu_s or 0.0), ended + 1
    return cpu


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def plain(folder: Path, rollouts: int) -> float:
    """CPU seconds a rollout of ``python harness.py``."""

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    for _ in range(rollouts):
        subprocess.run([sys.executable, "harness.py"], cwd=folder, env={**os.environ, **ENV}, check=True)
    return (children() - before) / rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "harness.py").write_text(HARNESS, encoding="utf-8")
        (folder / "warm.py").write_text(WARM, encoding="utf-8")
        warm = forked(folder, args.rollouts)
        cold = plain(folder, max(1, args.rollouts // 10))
    total = sum(value for key, value in warm.items() if key != "preload, once")
    print(f"CPU per rollout, {args.rollouts} rollouts, harness: import openai, make a client")
    for key, value in warm.items():
        print(f"  fork server, {key:14} {value * 1000:8.1f} ms")
    print(f"  fork server, {'total':14} {total * 1000:8.1f} ms")
    print(f"  plain subprocess            {cold * 1000:8.1f} ms   ({cold / total:.0f} times as much)")


if __name__ == "__main__":
    main()
