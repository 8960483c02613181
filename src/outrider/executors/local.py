"""Attempts as local processes, each a process group of its own, forked from a warm server."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import HarnessConfig
from outrider.errors import ConfigError
from outrider.protocols import Exit, Launch
from outrider.types import Json, Task

TAIL_BYTES = 8192
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL at the time limit."""
PYTHONS = ("python", "python3")
"""As the first word of a command these mean the interpreter that runs Outrider; give a path for another one."""


@dataclass(slots=True)
class _Live:
    launch: Launch
    began: float
    deadline: float
    timed_out: bool = False
    killed: bool = False
    cancelled: bool = False


class LocalExecutor:
    """Satisfies `protocols.Executor` for a harness given as a command line or as ``module:function``.

    `root` is the folder of the run file: scripts and modules are looked for there first.
    """

    def __init__(self, harness: HarnessConfig, *, root: Path) -> None:
        self._harness = harness
        self._root = root.resolve()
        self._ended: queue.Queue[Exit] = queue.Queue()
        self._live: dict[str, _Live] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._server: _ForkServer | None = None
        self._closed = False
        self._clock: threading.Thread | None = None

    # -- checks before a run ---------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Raise `ConfigError` when the harness does not exist."""
        harness = self._harness
        if harness.function:
            module = harness.function.partition(":")[0]
            sys.path.insert(0, str(self._root))
            try:
                if importlib.util.find_spec(module) is None:
                    raise ConfigError(f"harness.function: there is no module {module!r} (looked in {self._root}).")
            finally:
                sys.path.remove(str(self._root))
            return
        program = self._interpreter() or harness.command[0]
        if shutil.which(program) is None and not (self._root / program).exists():
            raise ConfigError(f"harness.command: there is no program {program!r} (looked in PATH and {self._root}).")
        script = self._script()
        if script is not None and not script.exists():
            raise ConfigError(f"harness.command: there is no script {script}.")

    def check(self, task: Task) -> None:
        """Raise `ConfigError` when the command asks for a field that `task` lacks."""
        for text in (*self._harness.command, self._harness.stdin):
            fill(text, task)

    # -- running ---------------------------------------------------------------------------------------------------

    def start(self, launch: Launch) -> None:
        now = time.monotonic()
        with self._lock:
            self._live[launch.attempt_id] = _Live(launch, now, now + self._harness.timeout_s)
            try:
                job = self._job(launch)
                if self._server is None:
                    self._server = _ForkServer(self._interpreter() or sys.executable, self._harness.preload, self._root)
                    threading.Thread(target=self._listen, args=(self._server,), daemon=True).start()
                self._server.send(job)
            except OSError as error:
                self._end(launch.attempt_id, lost=True, reason=f"cannot start the harness: {error}")
            if self._clock is None:
                self._clock = threading.Thread(target=self._watch_deadlines, name="deadlines", daemon=True)
                self._clock.start()
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[Exit]:
        ended = []
        try:
            ended.append(self._ended.get(timeout=timeout_s))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return ended

    def stop(self, attempt_id: str) -> None:
        with self._lock:
            live = self._live.get(attempt_id)
            if live is not None:
                live.cancelled = True
                self._signal(attempt_id, signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            server, self._server = self._server, None
        if server is not None:
            server.close()

    # -- how a harness is started ------------------------------------------------------------------------------------

    def _interpreter(self) -> str | None:
        """The Python that the command names; None for a command that is no Python program, or a function."""
        command = self._harness.command
        if not command:
            return None
        if command[0] in PYTHONS:
            return sys.executable
        return command[0] if os.path.basename(command[0]).startswith("python") else None

    def _script(self) -> Path | None:
        command = self._harness.command
        if self._interpreter() is None or len(command) < 2 or command[1].startswith("-"):
            return None
        return self._root / command[1]

    def _job(self, launch: Launch) -> Json:
        harness, workdir = self._harness, launch.workdir
        argv = [fill(part, launch.task) for part in harness.command]
        python = self._interpreter() is not None
        if python:
            argv = argv[1:]
            script = self._script()
            if script is not None:
                argv[0] = str(script)
        elif argv and (self._root / argv[0]).exists():
            argv[0] = str(self._root / argv[0])
        stdin = os.devnull
        if harness.stdin:
            stdin = f"{workdir}.stdin"
            Path(stdin).write_text(fill(harness.stdin, launch.task), encoding="utf-8")
        return {
            "op": "start",
            "id": launch.attempt_id,
            "python": python,
            "argv": argv,
            "function": harness.function,
            "fields": launch.task.fields if harness.function else None,
            "root": str(self._root),
            "cwd": str((self._root / harness.cwd) if harness.cwd else workdir),
            "env": {**os.environ, **launch.env, **harness.env},
            "stdin": stdin,
            "stdout": f"{workdir}.stdout",
            "stderr": f"{workdir}.stderr",
            "memory_mb": harness.memory_mb,
        }

    # -- how it ends -------------------------------------------------------------------------------------------------

    def _listen(self, server: _ForkServer) -> None:
        for message in server.messages():
            if message["op"] == "exit":
                code = message["code"]
                self._end(
                    message["id"],
                    exit_code=code if code >= 0 else None,
                    signal_number=-code if code < 0 else None,
                    cpu_s=message["cpu_s"],
                )
        with self._lock:
            if self._server is server:
                self._server = None
            if not self._closed:
                for attempt_id in list(self._live):
                    self._end(attempt_id, lost=True, reason=f"the fork server ended. {server.tail()}")
        server.close()

    def _end(
        self,
        attempt_id: str,
        *,
        exit_code: int | None = None,
        signal_number: int | None = None,
        lost: bool = False,
        reason: str = "",
        cpu_s: float | None = None,
    ) -> None:
        with self._lock:
            live = self._live.pop(attempt_id, None)
        if live is None:
            return
        stdout, stderr = (tail(Path(f"{live.launch.workdir}.{name}")) for name in ("stdout", "stderr"))
        if live.timed_out:
            reason = f"over its time limit of {self._harness.timeout_s:g} s"
        self._ended.put(
            Exit(
                attempt_id=attempt_id,
                exit_code=exit_code,
                signal=signal_number,
                timed_out=live.timed_out,
                cancelled=live.cancelled,
                lost=lost,
                reason=reason,
                stdout_tail=stdout,
                stderr_tail=stderr,
                duration_s=time.monotonic() - live.began,
                cpu_s=cpu_s,
            )
        )

    def _watch_deadlines(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                for attempt_id, live in self._live.items():
                    if not live.timed_out and now >= live.deadline:
                        live.timed_out, live.deadline = True, now + GRACE_S
                        self._signal(attempt_id, signal.SIGTERM)
                    elif live.timed_out and not live.killed and now >= live.deadline:
                        live.killed = True
                        self._signal(attempt_id, signal.SIGKILL)
                pending = [live.deadline for live in self._live.values() if not live.killed]
                self._changed.wait(max(0.0, min(pending) - now) if pending else None)

    def _signal(self, attempt_id: str, number: int) -> None:
        if self._server is not None:
            try:
                self._server.send({"op": "kill", "id": attempt_id, "signal": int(number)})
            except OSError:
                pass  # the server is gone, and its children with it; `_listen` reports them


class _ForkServer:
    """The other end of `forkserver.py`."""

    def __init__(self, interpreter: str, preload: tuple[str, ...], root: Path) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._send_lock = threading.Lock()
        script = Path(__file__).with_name("forkserver.py")
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, str(script), str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                cwd=root,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._said = bytearray()
        threading.Thread(target=self._read_stderr, daemon=True).start()

    def send(self, message: Json) -> None:
        with self._send_lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Any:
        """Yield what it says until it ends."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        yield json.loads(line)
        except OSError:
            return

    def tail(self) -> str:
        text = bytes(self._said).decode("utf-8", "replace").strip()
        return f"It said: {text}" if text else ""

    def close(self) -> None:
        """Close the channel, upon which the server kills its children and leaves; make sure of it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _read_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with stream:
            while data := os.read(stream.fileno(), 4096):
                self._said = (self._said + data)[-TAIL_BYTES:]


def fill(text: str, task: Task) -> str:
    """Put the task's fields into ``{field}`` places; ``{{`` and ``}}`` are braces. Raises `ConfigError`."""
    out = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(text):
            out.append(literal)
            if name is not None:
                if spec or conversion or name not in task.fields:
                    have = ", ".join(sorted(task.fields))
                    raise ConfigError(
                        f"harness.command: {{{name}}} is no field of task {task.id!r}, which has: {have}."
                    )
                out.append(str(task.fields[name]))
    except ValueError as error:
        raise ConfigError(f"harness.command: {text!r}: {error}. Write {{{{ and }}}} for plain braces.") from None
    return "".join(out)


def tail(file: Path) -> str:
    """The last bytes of a file as text; empty where there is none."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            return opened.read().decode("utf-8", "replace")
    except OSError:
        return ""
