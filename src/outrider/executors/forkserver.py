"""A warm process that forks one child for each attempt, so that a harness starts without importing its world again.

Run by path under the harness's own interpreter (3.9 or newer), which need not have Outrider: standard library only.

    PYTHON forkserver.py FD PATH0 PRELOAD…    serve
    PYTHON forkserver.py --check < JOB        print what is missing for a job, as a JSON string; "" if nothing

FD is a socket that carries one JSON object a line. In: ``start`` (a job, see `run_job`) and ``kill``. Out: ``ready``,
``started``, ``exit``. When the other side closes, every child is killed and the server leaves. PATH0 is ``sys.path[0]``
while modules are preloaded.

A child sees what it would see under a plain interpreter: its own ``__main__``, ``sys.argv``, ``sys.path[0]``, working
directory, environment and standard streams; its exit status, tracebacks and ``atexit`` handlers are those of Python.
Two things differ. Variables that an interpreter reads at its start (``PYTHONPATH``, …) are those of the server, and at
the end open files are flushed but no ``__del__`` is run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
NOT_FOUND_STATUS = 127


def main() -> None:
    if sys.argv[1] == "--check":
        print(json.dumps(check(json.load(sys.stdin))))
        return
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    set_first_path(sys.argv[2])
    for name in sys.argv[3:]:
        preload(name)
    # What was loaded so far is never garbage: keep the collector from touching, and so from copying, its pages.
    gc.collect()
    gc.freeze()
    forked = Server(control).serve()
    if forked is not None:
        run_job(*forked)


def preload(name: str) -> None:
    """Import a module; ``module:callable`` also calls it once. A failure is told and costs only speed."""
    module, _, attr = name.partition(":")
    try:
        loaded = importlib.import_module(module)
        if attr:
            getattr(loaded, attr)()
    except Exception as error:
        print(f"preload {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class Child(NamedTuple):
    attempt_id: str
    began: float
    problem: int
    """Pipe by which it tells that its harness does not exist."""


class Server:
    """The loop. `serve` returns None in the server; in a freshly forked child the job and the pipe for `run_job`."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, Child] = {}
        self.buffer = b""
        self.parent = os.getppid()
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)

    def serve(self) -> tuple[dict[str, Any], int] | None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        # Not SIGKILL: Linux sends it when the *thread* that started us ends, which is no reason to leave.
        die_with_parent(signal.SIGUSR1)
        self.send({"op": "ready"})
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self.wake_read, selectors.EVENT_READ)
            while os.getppid() == self.parent:
                for key, _ in selector.select():
                    if key.fileobj == self.wake_read:
                        self.reap()
                    elif not self.receive():
                        self.kill_all()
                        return None
                *lines, self.buffer = self.buffer.split(b"\n")
                for line in lines:
                    forked = self.handle(json.loads(line))
                    if forked is not None:
                        return forked
        self.kill_all()
        return None

    def receive(self) -> bool:
        """False when the other side is gone."""
        try:
            data = self.control.recv(1 << 20)
        except OSError:
            return False
        self.buffer += data
        return bool(data)

    def handle(self, message: dict[str, Any]) -> tuple[dict[str, Any], int] | None:
        if message["op"] == "kill":
            for pid, child in self.children.items():
                if child.attempt_id == message["id"]:
                    kill_group(pid, message["signal"])
            return None
        server = os.getpid()
        problem_read, problem_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.control.close()
            others = [child.problem for child in self.children.values()]
            for descriptor in (self.wake_read, self.wake_write, problem_read, *others):
                os.close(descriptor)
            os.setsid()
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            return message, problem_write
        os.close(problem_write)
        os.set_blocking(problem_read, False)
        self.children[pid] = Child(message["id"], time.monotonic(), problem_read)
        self.send({"op": "started", "id": message["id"], "pid": pid})
        return None

    def reap(self) -> None:
        try:
            while os.read(self.wake_read, 4096):
                pass
        except BlockingIOError:
            pass
        while self.children:
            # Look before reaping: while the leader is a zombie, its process group cannot be somebody else's.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            kill_group(ended.si_pid, signal.SIGKILL)  # what the harness left running behind it
            pid, status, usage = os.wait4(ended.si_pid, 0)
            child = self.children.pop(pid, None)
            if child is None:
                continue  # started by a preloaded module
            self.send(
                {
                    "op": "exit",
                    "id": child.attempt_id,
                    "code": os.waitstatus_to_exitcode(status),
                    "problem": read_all(child.problem),
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "duration_s": time.monotonic() - child.began,
                }
            )
            os.close(child.problem)

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the other side is gone; the loop finds out

    def kill_all(self) -> None:
        for pid in self.children:
            kill_group(pid, signal.SIGKILL)


def run_job(job: dict[str, Any], problem_write: int) -> None:
    """Become the harness. Does not return.

    `job` has ``kind`` (program, script, module, code or function), ``argv``, ``env``, ``cwd``, ``stdin``, ``stdout``
    and ``stderr`` (paths), ``memory_mb``; a function has ``function`` (module:function), ``root`` and ``fields``.
    """
    redirect(0, job["stdin"], os.O_RDONLY)
    redirect(1, job["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    redirect(2, job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if job["memory_mb"]:
        limit = job["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A fresh namespace, so that neither the harness nor what it pickles meets this file.
    sys.modules["__main__"] = types.ModuleType("__main__")

    def body() -> None:
        problem = missing(job)
        if not problem and job["kind"] == "program":
            problem = execute(job["argv"])
        os.write(problem_write, problem.encode("utf-8", "replace")[:4096])
        os.close(problem_write)
        if problem:
            print(problem, file=sys.stderr)
            sys.exit(NOT_FOUND_STATUS)
        RUN[job["kind"]](job)

    leave(*guarded(body))


def check(job: dict[str, Any]) -> str:
    """What keeps `job` from being started; ``""`` if nothing. Imports the function's module, and runs nothing else."""
    os.chdir(job["cwd"])
    output, sys.stdout = sys.stdout, sys.stderr  # a module that prints when it is imported is no answer
    try:
        if job["kind"] == "program" and shutil.which(job["argv"][0]) is None:
            return f"there is no program {job['argv'][0]!r} that can be executed (looked in PATH and {job['root']})"
        problem = missing(job)
        set_first_path(job["root"])
        names = [name.partition(":")[0] for name in job["preload"]]
        absent = [name for name in names if not module_exists(name)]
        return problem or (f"preload: {sys.executable} has no module {absent[0]!r}" if absent else "")
    except Exception as error:
        return f"{job['function'] or job['argv'][0]} cannot be imported: {type(error).__name__}: {error}"
    finally:
        sys.stdout = output


def missing(job: dict[str, Any]) -> str:
    """Set ``sys.path[0]`` and tell whether there is something to run. What a module raises on import passes through."""
    argv = job["argv"]
    if job["kind"] == "script":
        set_first_path(os.path.dirname(os.path.realpath(argv[0])))
        return "" if os.path.isfile(argv[0]) else f"there is no script {os.path.abspath(argv[0])}"
    if job["kind"] == "module":
        set_first_path(os.getcwd())
        return "" if module_exists(argv[0]) else f"{sys.executable} has no module {argv[0]!r}"
    if job["kind"] == "function":
        set_first_path(job["root"])
        module, _, attr = job["function"].partition(":")
        if not module_exists(module):
            return f"there is no module {module!r} (looked in {job['root']} and the packages of {sys.executable})"
        found: Any = importlib.import_module(module)
        for part in attr.split("."):
            found = getattr(found, part, None)
        return "" if callable(found) else f"module {module!r} has no function {attr!r}"
    return ""


def module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False
    except ValueError:  # in sys.modules, but made by hand
        return name in sys.modules


def execute(argv: list[str]) -> str:
    """Replace this process by a program. Returns only when there is none, with the reason."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # Python changed them, and what is ignored stays so in a new program
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        return f"{argv[0]}: {error.strerror}"


def run_script(job: dict[str, Any]) -> None:
    sys.argv = job["argv"]
    main_module = sys.modules["__main__"]
    main_module.__file__ = sys.argv[0]
    with open(sys.argv[0], "rb") as file:
        source = file.read()
    exec(compile(source, sys.argv[0], "exec", dont_inherit=True), main_module.__dict__)


def run_code(job: dict[str, Any]) -> None:
    set_first_path("")
    sys.argv = ["-c", *job["argv"][1:]]
    exec(compile(job["argv"][0], "<string>", "exec", dont_inherit=True), sys.modules["__main__"].__dict__)


def run_module(job: dict[str, Any]) -> None:
    sys.argv = ["-m", *job["argv"][1:]]
    runpy._run_module_as_main(job["argv"][0])  # type: ignore[attr-defined]  # what ``python -m`` itself calls


def run_function(job: dict[str, Any]) -> None:
    """Call it with the task's fields as one dict; what it returns is printed, as JSON unless it is a string."""
    module, _, attr = job["function"].partition(":")
    found: Any = sys.modules[module]
    for part in attr.split("."):
        found = getattr(found, part)
    sys.argv = [job["function"]]
    result = found(job["fields"])
    if result is not None:
        print(result if isinstance(result, str) else json.dumps(result))


RUN = {"script": run_script, "code": run_code, "module": run_module, "function": run_function}


def guarded(body: Any) -> tuple[int, bool]:
    """Run `body`; return the exit status that Python would give, and whether it ended by Ctrl-C."""
    try:
        body()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF, False
        print(error.code, file=sys.stderr)
        return 1, False
    except BaseException as error:
        # Without the frames of this file: they are not the harness's.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except Exception:
            traceback.print_exc()
        return 1, isinstance(error, KeyboardInterrupt)
    return 0, False


def leave(status: int, interrupted: bool) -> None:
    """End as an interpreter does, without the tear-down of every module, which costs more than most harnesses run."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins what is not a daemon
    atexit._run_exitfuncs()
    # `gc.freeze` took the server's own objects away: what is listed here was made by the harness.
    opened = [item for item in gc.get_objects() if issubclass(type(item), (io.TextIOWrapper, io.BufferedWriter))]
    for stream in (*opened, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (AttributeError, OSError, ValueError):
            status = status or (120 if stream in (sys.stdout, sys.stderr) else 0)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def set_first_path(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # else there is no first entry of ours
        sys.path[0] = path


def redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


def read_all(descriptor: int) -> str:
    try:
        return os.read(descriptor, 4096).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


def die_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def kill_group(pid: int, number: int) -> None:
    """Signal the group of a child that is not reaped yet; the child alone while it has not made its group."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
            return
        except (ProcessLookupError, PermissionError):
            pass


if __name__ == "__main__":
    main()
