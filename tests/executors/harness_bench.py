"""Running one harness through the local executor, with the waiting done once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from outrider.config import HarnessConfig
from outrider.executors.local import LocalExecutor
from outrider.protocols import Exit, Launch
from outrider.types import Task

PATIENCE_S = 60.0


class Bench:
    """A folder with harness files, and executors over it that are closed at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.executors: list[LocalExecutor] = []

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def executor(self, *command: str, **config: Any) -> LocalExecutor:
        executor = LocalExecutor(HarnessConfig(command=command, **config), root=self.root)
        self.executors.append(executor)
        return executor

    def start(self, executor: LocalExecutor, attempt_id: str = "a1", **fields: Any) -> Path:
        """Start an attempt; returns its working folder."""
        env = fields.pop("env", {})
        workdir = self.root / "work" / attempt_id
        workdir.mkdir(parents=True)
        task = Task(id="t1", fields={"id": "t1", **fields})
        executor.start(Launch(attempt_id=attempt_id, task=task, env=env, workdir=workdir))
        return workdir

    def run(self, *command: str, fields: dict[str, Any] | None = None, **config: Any) -> Exit:
        executor = self.executor(*command, **config)
        self.start(executor, **(fields or {}))
        return one(executor)

    def script(self, text: str, *arguments: str, **config: Any) -> Exit:
        self.write("agent.py", text)
        return self.run("python", "agent.py", *arguments, **config)


def one(executor: LocalExecutor) -> Exit:
    """The next attempt that ends."""
    (found,) = collect(executor, 1)
    return found


def collect(executor: LocalExecutor, count: int) -> list[Exit]:
    found: list[Exit] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} attempts ended"
        found += executor.poll(5)
    assert len(found) == count
    return found


def wait_until(condition: Callable[[], Any]) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def read_pid(path: Path) -> int:
    """A process id that a harness writes to a file, newline last."""
    return int(wait_until(lambda: path.exists() and path.read_text().endswith("\n") and path.read_text()))


def gone(pid: int) -> bool:
    """The process is no more, or a zombie that nobody has reaped yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def fork_server() -> psutil.Process:
    """The only fork server among this process's children. One that is being started may not have its name yet."""

    def servers() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if "forkserver.py" in " ".join(child.cmdline())]

    (found,) = wait_until(servers)
    return found
