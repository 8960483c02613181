"""A warm process that forks one child for each attempt, so that a harness starts without importing its world again.

Run by path under the harness's own interpreter, which need not have Outrider installed: standard library only.

    PYTHON forkserver.py FD PRELOAD…

FD is a socket that carries one JSON object a line. In: ``start`` (see `run_job`) and ``kill``. Out: ``ready``,
``started``, ``exit``. When the other side closes, every child is killed and the server leaves.

A child sees what it would see under a plain interpreter: its own ``__main__``, ``sys.argv``, ``sys.path[0]``, working
directory, environment and standard streams; its exit code, tracebacks and ``atexit`` handlers are those of Python.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any

PR_SET_PDEATHSIG = 1
COMMAND_NOT_FOUND = 127


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    die_with_parent()
    for name in sys.argv[2:]:
        preload(name)
    # What was loaded so far is never garbage: keep the collector from touching, and so from copying, its pages.
    gc.collect()
    gc.freeze()
    job = Server(control).serve()
    if job is not None:
        leave(run_job(job))


def preload(name: str) -> None:
    """Import a module; ``module:callable`` also calls it once. A failure is told and costs only speed."""
    module, _, attr = name.partition(":")
    try:
        loaded = importlib.import_module(module)
        if attr:
            getattr(loaded, attr)()
    except Exception as error:
        print(f"preload {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class Server:
    """The loop. `serve` returns None in the server and the job in a freshly forked child."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, str] = {}
        self.buffer = b""
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)

    def serve(self) -> dict[str, Any] | None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        self.send({"op": "ready"})
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self.wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj == self.wake_read:
                        self.reap()
                        continue
                    data = self.control.recv(1 << 20)
                    if not data:
                        self.kill_all()
                        return None
                    self.buffer += data
                *lines, self.buffer = self.buffer.split(b"\n")
                for line in lines:
                    job = self.handle(json.loads(line))
                    if job is not None:
                        return job

    def handle(self, message: dict[str, Any]) -> dict[str, Any] | None:
        if message["op"] == "kill":
            for pid, attempt_id in self.children.items():
                if attempt_id == message["id"]:
                    kill_group(pid, message["signal"])
            return None
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.control.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            os.setsid()
            die_with_parent(server)
            return message
        self.children[pid] = message["id"]
        self.send({"op": "started", "id": message["id"], "pid": pid})
        return None

    def reap(self) -> None:
        try:
            while os.read(self.wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while self.children:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            attempt_id = self.children.pop(pid, None)
            if attempt_id is not None:
                kill_group(pid, signal.SIGKILL)  # what the harness left running behind it
                cpu_s = usage.ru_utime + usage.ru_stime
                code = os.waitstatus_to_exitcode(status)
                self.send({"op": "exit", "id": attempt_id, "code": code, "cpu_s": cpu_s})

    def send(self, message: dict[str, Any]) -> None:
        self.control.sendall(json.dumps(message).encode() + b"\n")

    def kill_all(self) -> None:
        for pid in self.children:
            kill_group(pid, signal.SIGKILL)


def run_job(job: dict[str, Any]) -> int:
    """Become the harness. `job` has cwd, env, stdin, stdout, stderr (paths), memory_mb, and one of argv or function."""
    redirect(0, job["stdin"], os.O_RDONLY)
    redirect(1, job["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    redirect(2, job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if job["memory_mb"]:
        limit = job["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if job.get("function"):
        return guarded(lambda: call_function(job))
    argv = job["argv"]
    if job["python"]:
        return guarded(lambda: run_python(argv))
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return COMMAND_NOT_FOUND


def run_python(argv: list[str]) -> None:
    """``SCRIPT ARGS…``, ``-m MODULE ARGS…`` or ``-c CODE ARGS…``."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    script = None if argv[0] == "-c" else argv[0]
    main_module = types.ModuleType("__main__")
    if script is None:
        sys.argv, sys.path[0], source, name = ["-c", *argv[2:]], "", argv[1].encode(), "<string>"
    else:
        sys.argv, sys.path[0], name = argv, os.path.dirname(os.path.realpath(script)), script
        main_module.__file__ = script
        with open(script, "rb") as file:
            source = file.read()
    sys.modules["__main__"] = main_module
    exec(compile(source, name, "exec"), main_module.__dict__)


def call_function(job: dict[str, Any]) -> None:
    """``module:function`` with the task's fields as one dict; what it returns is printed as JSON."""
    sys.path[0] = job["root"]
    module, _, attr = job["function"].partition(":")
    found: Any = importlib.import_module(module)
    for part in attr.split("."):
        found = getattr(found, part)
    sys.argv = [job["function"]]
    result = found(job["fields"])
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result))


def guarded(body: Any) -> int:
    """Run `body` and return the exit status that Python would."""
    try:
        body()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        # Without the frames of this file: they are not the harness's.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def leave(status: int) -> None:
    """End as an interpreter does, without the tear-down of every module, which costs more than most harnesses run."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins what is not a daemon
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or 120
    os._exit(status)


def redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, descriptor)
    if opened != descriptor:
        os.close(opened)


def die_with_parent(expected: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends (Linux); leave at once if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if expected is not None and os.getppid() != expected:
            os._exit(1)


def kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    main()
