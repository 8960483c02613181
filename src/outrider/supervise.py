"""Keeps the services of a run alive: starts them, restarts one that dies, and remembers when it was down.

Each service is a process of its own in its own session, so that Ctrl-C reaches the trainer alone and the trainer
decides what stops when. Services watch for the trainer's death themselves (`parent_pid`), so a killed trainer leaves
none behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import RunError, SetupError
from outrider.outcome import Outage
from outrider.types import Failure

MAX_RESTARTS = 5
"""Unplanned deaths of one service within `RESTART_WINDOW_S` that are borne."""
RESTART_WINDOW_S = 300.0


@dataclass(slots=True)
class Service:
    """One process. `argv` is asked anew at each start, so that a restarted engine loads the newest weights."""

    name: Failure
    argv: Callable[[], list[str]]
    env: Mapping[str, str]
    log: Path
    wait_ready: Callable[[float], None]
    """Blocks until requests are served; raises `SetupError`."""
    start_timeout_s: float
    process: subprocess.Popen[bytes] | None = None
    deaths: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv(),
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Return when it serves. Raises `SetupError` with the end of its log when it dies or takes too long."""
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            assert self.process is not None
            status = self.process.poll()
            if status is not None:
                raise SetupError(f"the {self.name} ended with status {status} at its start.\n{self.tail()}")
            try:
                return self.wait_ready(1.0)
            except SetupError:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"the {self.name} was not ready after {self.start_timeout_s:g} s.\n{self.tail()}"
                    ) from None

    def tail(self, size: int = 1500) -> str:
        """The end of its log, for messages."""
        try:
            text = self.log.read_bytes()[-size:].decode("utf-8", "replace").strip()
        except OSError:
            return ""
        return f"The end of {self.log}:\n{text}"


@dataclass(slots=True)
class Supervisor:
    """Runs services until closed. `on_restart` is told in one sentence."""

    on_restart: Callable[[str], None]
    services: list[Service] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    broken: str = ""
    _closing: threading.Event = field(default_factory=threading.Event)
    _up: threading.Condition = field(default_factory=threading.Condition)
    _down: set[Failure] = field(default_factory=set)
    _thread: threading.Thread | None = None

    def start(self, services: list[Service]) -> None:
        """Start all at once and return, so that the caller can load a model meanwhile."""
        self.services = services
        for service in services:
            service.start()

    def await_ready(self) -> None:
        """Return when all serve; from then on they are watched. Raises `SetupError`."""
        for service in self.services:
            service.await_ready()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `RunError` when a service keeps dying."""
        if self.broken:
            raise RunError(self.broken)

    def all_up(self) -> bool:
        """Whether every service runs and is ready."""
        return not self._dead()

    def wait_up(self) -> None:
        """Return when no service is down. Raises `RunError` when one keeps dying."""
        with self._up:
            self._up.wait_for(lambda: self.broken or not self._dead(), timeout=None)
        self.check()

    def known_outages(self) -> list[Outage]:
        """Every outage so far, one that still lasts included."""
        now = time.time()
        return [*self.outages, *(Outage(service=name, began_at=now, ended_at=now) for name in self._dead())]

    def close(self) -> None:
        """Ask every service to stop, wait a little, then kill."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=30)
        live = [service.process for service in self.services if service.process and service.process.poll() is None]
        for process in live:
            process.terminate()
        deadline = time.monotonic() + 10
        for process in live:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                kill_group(process.pid)
                process.wait()

    def kill(self) -> None:
        """Kill every service at once."""
        self._closing.set()
        for service in self.services:
            if service.process is not None:
                kill_group(service.process.pid)

    def _dead(self) -> set[Failure]:
        gone = {s.name for s in self.services if s.process is not None and s.process.poll() is not None}
        return self._down | gone

    def _watch(self) -> None:
        # The children carry a parent-death signal, which the kernel ties to the *thread* that started them: this
        # thread restarts services and so has to live as long as the run.
        while not self._closing.wait(0.1):
            for service in self.services:
                if service.process is not None and service.process.poll() is not None:
                    self._restart(service)
            if self.broken:
                return

    def _restart(self, service: Service) -> None:
        assert service.process is not None
        began_at, status = time.time(), service.process.returncode
        self._down.add(service.name)
        service.deaths = [at for at in service.deaths if began_at - at < RESTART_WINDOW_S] + [began_at]
        try:
            if len(service.deaths) > MAX_RESTARTS:
                raise SetupError(f"the {service.name} died {len(service.deaths)} times.\n{service.tail()}")
            self.on_restart(f"the {service.name} died (status {status}) and is started again")
            service.start()
            service.await_ready()
        except (SetupError, OSError) as error:
            self.broken = f"{error}\nThe run can be resumed by the same command."
        self.outages.append(Outage(service=service.name, began_at=began_at, ended_at=time.time()))
        with self._up:
            self._down.discard(service.name)
            self._up.notify_all()


def free_port(host: str, wanted: int, what: str) -> int:
    """`wanted` if it can be bound, or any free one for 0. Raises `SetupError` that names the field."""
    with hold_port(host, wanted, what) as port:
        return port


@contextlib.contextmanager
def hold_port(host: str, wanted: int, what: str) -> Iterator[int]:
    """The same, and nobody else gets the port meanwhile, whether the service that listens on it is up or not.

    Without that, what asks for a service that is down may be given the service's port by the system as its own, and is
    then connected with itself: the service could never come back. The service has to bind with SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, wanted))
        except OSError as error:
            raise SetupError(
                f"{what}: cannot listen on {host}:{wanted} ({error.strerror}). Choose another port, or 0 for any."
            ) from None
        yield int(held.getsockname()[1])


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
