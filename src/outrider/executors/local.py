"""Attempts as local processes, each a process group of its own, forked from a warm server."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.config import HarnessConfig
from outrider.errors import ConfigError
from outrider.executors import forkclient
from outrider.executors.command import Command
from outrider.executors.forkclient import ForkServer
from outrider.protocols import Exit, Launch
from outrider.types import Json, Task

TAIL_BYTES = 8192
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL at the time limit."""
START_LIMIT_S = 300.0
"""How long preloading may keep the fork server from starting an attempt."""


@dataclass(slots=True)
class _Live:
    launch: Launch
    began: float
    deadline: float
    server: ForkServer | None = None
    pid: int | None = None
    """None until the fork server has started it. It leads the process group of that number."""
    timed_out: bool = False
    killed: bool = False
    cancelled: bool = False


class LocalExecutor:
    """Satisfies `protocols.Executor` for a harness given as a command line or as ``module:function``.

    `root` is the folder of the run file; relative paths start there. Standard output and error go to files beside the
    attempt's folder: ``<workdir>.stdout`` and ``<workdir>.stderr``.
    """

    def __init__(self, harness: HarnessConfig, *, root: Path) -> None:
        self._harness = harness
        self._root = root.resolve()
        self._command = Command(harness, self._root)
        self._ended: queue.Queue[Exit] = queue.Queue()
        self._live: dict[str, _Live] = {}
        self._changed = threading.Condition()
        self._server: ForkServer | None = None
        self._closed = False
        self._held_since: float | None = None
        """While time limits stand still: since when."""
        self._clock: threading.Thread | None = None

    def validate(self) -> None:
        """Raise `ConfigError` when the harness or a preloaded module does not exist, with where it was looked for."""
        command = self._command
        if self._harness.cwd and not (self._root / self._harness.cwd).is_dir():
            raise ConfigError(f"harness.cwd: there is no folder {self._root / self._harness.cwd}.")
        if command.depends_on_task:
            return
        job = command.job(None, workdir=self._root, env={})
        problem = forkclient.check(command.interpreter, job, env=command.env({}), timeout_s=START_LIMIT_S)
        if problem.startswith("preload: "):
            raise ConfigError(f"harness.{problem}.")
        if problem:
            raise ConfigError(f"{command.name}: {problem}.")

    def check(self, task: Task) -> None:
        """Raise `ConfigError` when the command or the standard input asks for a field that `task` lacks."""
        self._command.check(task)

    def start(self, launch: Launch) -> None:
        now = time.monotonic()
        with self._changed:
            self._live[launch.attempt_id] = _Live(launch, now, now + START_LIMIT_S)
            if self._clock is None:
                self._clock = threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True)
                self._clock.start()
            self._changed.notify_all()
        blank = Exit(attempt_id=launch.attempt_id, exit_code=None, signal=None)
        try:
            job = self._job(launch)
            server = self._warm_server(launch.attempt_id)
        except FileNotFoundError as error:
            self._end(replace(blank, not_found=True, reason=f"{self._command.name}: {error.filename} does not exist"))
        except (OSError, ConfigError) as error:
            self._end(replace(blank, lost=True, reason=f"cannot start the harness: {error}"))
        else:
            try:
                server.send({"op": "start", "id": launch.attempt_id, **job})
            except OSError:
                pass  # it is gone; `_listen` reports the attempt, and why

    def poll(self, timeout_s: float) -> list[Exit]:
        ended = []
        try:
            ended.append(self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait())
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return ended

    def stop(self, attempt_id: str) -> None:
        with self._changed:
            live = self._live.get(attempt_id)
            if live is None:
                return
            live.cancelled = True
        self._signal(attempt_id, signal.SIGKILL)

    def hold_time(self, held: bool) -> None:
        with self._changed:
            now = time.monotonic()
            if held and self._held_since is None:
                self._held_since = now
            elif not held and self._held_since is not None:
                for live in self._live.values():
                    live.deadline += now - max(self._held_since, live.began)
                self._held_since = None
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _job(self, launch: Launch) -> Json:
        job = self._command.job(launch.task, workdir=launch.workdir, env=launch.env)
        stdin = os.devnull
        if self._harness.stdin:
            stdin = f"{launch.workdir}.stdin"
            Path(stdin).write_text(self._command.stdin(launch.task), encoding="utf-8", newline="")
        return {**job, "stdin": stdin, "stdout": f"{launch.workdir}.stdout", "stderr": f"{launch.workdir}.stderr"}

    def _warm_server(self, attempt_id: str) -> ForkServer:
        """The fork server, started if there is none; the attempt now lives and dies with it."""
        with self._changed:
            if self._closed:
                raise ConnectionError("the executor is closed")
            if self._server is None:
                command = self._command
                self._server = ForkServer(
                    command.interpreter,
                    first_path=command.first_path,
                    preload=self._harness.preload,
                    env=command.env({}),
                )
                threading.Thread(target=self._listen, args=(self._server,), name="exits", daemon=True).start()
            self._live[attempt_id].server = self._server
            return self._server

    def _listen(self, server: ForkServer) -> None:
        """Follow one fork server to its end."""
        for message in server.messages():
            if message["op"] == "started":
                self._on_started(message["id"], message["pid"])
            elif message["op"] == "exit":
                code, problem = message["code"], message["problem"]
                self._end(
                    Exit(
                        attempt_id=message["id"],
                        exit_code=code if code >= 0 else None,
                        signal=-code if code < 0 else None,
                        not_found=bool(problem),
                        reason=f"{self._command.name}: {problem}" if problem else "",
                        cpu_s=message["cpu_s"],
                        duration_s=message["duration_s"],
                    )
                )
        reason = server.epitaph()
        with self._changed:
            if self._server is server:
                self._server = None
            closed = self._closed
            orphans = [(attempt_id, live) for attempt_id, live in self._live.items() if live.server is server]
        for attempt_id, live in orphans:
            # The kernel killed the children with their server, but not what these had started.
            if live.pid is not None:
                _kill_group(live.pid)
            live.cancelled = live.cancelled or closed
            self._end(Exit(attempt_id=attempt_id, exit_code=None, signal=None, lost=not closed, reason=reason))
        server.close()

    def _on_started(self, attempt_id: str, pid: int) -> None:
        with self._changed:
            live = self._live.get(attempt_id)
            if live is not None:
                live.pid, live.began = pid, time.monotonic()
                live.deadline = live.began + self._harness.timeout_s
                self._changed.notify_all()
                if live.cancelled:
                    self._signal(attempt_id, signal.SIGKILL)

    def _end(self, found: Exit) -> None:
        """Complete `found` with what is known here, and hand it to `poll`."""
        with self._changed:
            live = self._live.pop(found.attempt_id, None)
        if live is None:
            return
        limit = f"over its time limit of {self._harness.timeout_s:g} s"
        self._ended.put(
            replace(
                found,
                timed_out=live.timed_out,
                cancelled=live.cancelled,
                reason=limit if live.timed_out and not found.lost else found.reason,
                stdout_tail=_tail(Path(f"{live.launch.workdir}.stdout")),
                stderr_tail=_tail(Path(f"{live.launch.workdir}.stderr")),
                duration_s=found.duration_s or time.monotonic() - live.began,
            )
        )

    def _watch_deadlines(self) -> None:
        while True:
            due: list[tuple[str, signal.Signals]] = []
            with self._changed:
                if self._closed:
                    return
                if self._held_since is not None:
                    self._changed.wait()
                    continue
                now = time.monotonic()
                for attempt_id, live in self._live.items():
                    if now >= live.deadline and not live.killed:
                        due.append((attempt_id, self._overdue(live, now)))
                if not due:
                    pending = [live.deadline for live in self._live.values() if not live.killed]
                    self._changed.wait(min(pending) - now if pending else None)
            for attempt_id, number in due:
                self._signal(attempt_id, number)

    def _overdue(self, live: _Live, now: float) -> signal.Signals:
        """The next signal for an attempt past its deadline."""
        if live.pid is None and live.server is not None:
            live.killed = True
            live.server.kill()  # it hangs in a preload; `_listen` reports what it had
        elif not live.timed_out:
            live.timed_out, live.deadline = True, now + GRACE_S
            return signal.SIGTERM
        live.killed = True
        return signal.SIGKILL

    def _signal(self, attempt_id: str, number: signal.Signals) -> None:
        with self._changed:
            server = self._server
        if server is not None:
            try:
                server.send({"op": "kill", "id": attempt_id, "signal": int(number)})
            except OSError:
                pass  # the server is gone, and its children with it; `_listen` reports them


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _tail(file: Path) -> str:
    """The last bytes of a file as text; empty where there is none."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            return opened.read().decode("utf-8", "replace")
    except OSError:
        return ""
