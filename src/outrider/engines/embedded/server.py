"""The engine as a process: options, start, and a clean end. Importing this module does not import torch."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import uvicorn

from outrider.engines.embedded.weights import resolve_model
from outrider.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from outrider.engines.embedded.scheduler import Scheduler

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0
DRAIN_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How one engine is started."""

    model: str
    """A Hugging Face folder, a ``.gguf`` file, or ``package:NAME``."""
    name: str = "policy"
    """The model name that requests use."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 for any free one; the ready line says which."""
    slots: int = 32
    """Sequences decoded at the same time."""
    max_model_len: int = 2048
    """Longest prompt plus answer, tokens. A model that was made for fewer sets the limit."""
    prefix_cache_tokens: int = 16384
    """Size of the prefix cache; 0 turns reuse between requests off."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; auto is bfloat16."""
    threads: int = 0
    """CPU threads; 0 for all cores. The answers are the same for any number."""
    seed: int = 0
    """Source of the seeds of requests that bring none."""
    version: int = 0
    """Policy version of the weights that are loaded first."""
    parent_pid: int = 0
    """Exit when this process is gone; 0 to outlive it."""


def serve(options: EngineOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` or `SetupError` when it cannot start."""
    started = time.monotonic()
    _check(options)
    listener = _bind(options.host, options.port)
    with listener:
        _calm_openmp()
        app, scheduler, max_model_len = build(options)
        server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=DRAIN_S))
        server.scheduler = scheduler
        if options.parent_pid:
            _follow(options.parent_pid, server)
        port = listener.getsockname()[1]
        server.ready_line = (
            f"outrider engine ready on http://{options.host}:{port} after {time.monotonic() - started:.1f} s: "
            f"model {options.model} as {options.name!r}, version {options.version}, {options.slots} slots, "
            f"{max_model_len} tokens each"
        )
        server.run(sockets=[listener])


def build(options: EngineOptions) -> tuple[Starlette, Scheduler, int]:
    """Load everything; return the app, the scheduler that it starts, and the context length in force."""
    folder = resolve_model(options.model)
    try:
        from outrider.engines.embedded import app, model, requests, scheduler, vocabulary
    except ImportError as error:
        raise SetupError(
            f"The embedded engine needs {error.name!r}. Install the extra: pip install 'outrider[train]'"
        ) from error
    words = vocabulary.Vocabulary(folder)
    loaded = model.load_model(folder, options.dtype, options.max_model_len)
    max_model_len = min(options.max_model_len, loaded.shape.max_positions)
    courier = app.Courier()
    engine = scheduler.Scheduler(
        loaded,
        words,
        slots=options.slots,
        max_model_len=max_model_len,
        prefix_cache_tokens=options.prefix_cache_tokens,
        version=options.version,
        threads=options.threads,
        deliver=courier,
    )
    engine.warm_up()
    limits = requests.Limits(model=options.name, max_model_len=max_model_len, vocabulary=loaded.shape.vocabulary)
    service = app.Service(
        model=loaded, vocabulary=words, scheduler=engine, courier=courier, limits=limits, seed=options.seed
    )
    return service.app(), engine, max_model_len


class _Server(uvicorn.Server):
    """Uvicorn that announces itself, ends its streams when told to stop, and returns instead of dying of the signal."""

    scheduler: Scheduler | None = None
    ready_line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self.ready_line, file=sys.stderr, flush=True)  # noqa: T201

    def stop(self) -> None:
        self.should_exit = True
        if self.scheduler is not None:
            self.scheduler.close()  # ends open streams, which a graceful stop would otherwise wait for

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda *_: self.stop()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _calm_openmp() -> None:
    """Before torch loads OpenMP: its threads would otherwise spin while they wait, on cores that others need.

    A few microseconds of spinning are left: a step is some 500 short operations, and going to sleep costs more.
    """
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def _check(options: EngineOptions) -> None:
    for field, least in (("slots", 1), ("max_model_len", 2), ("prefix_cache_tokens", 0), ("threads", 0), ("port", 0)):
        if getattr(options, field) < least:
            raise ConfigError(f"engine.{field}: is {getattr(options, field)}, must be at least {least}.")
    if options.dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"engine.dtype: is {options.dtype!r}, must be auto, bfloat16 or float32.")


def _bind(host: str, port: int) -> socket.socket:
    """Bound at once, so that a port in use is told before a model is loaded; listened on only when all is ready."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        if listener is not None:
            listener.close()
        raise SetupError(
            f"engine.port: cannot listen on {host}:{port}: {error}. Choose another, or 0 for any."
        ) from error
    return listener


def _follow(parent: int, server: _Server) -> None:
    """Stop the server when process `parent` is gone."""

    def gone() -> bool:
        if os.getppid() == parent:
            return False
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def watch() -> None:
        while not gone():
            time.sleep(PARENT_POLL_S)
        server.stop()

    threading.Thread(target=watch, name="outrider-parent", daemon=True).start()
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread() and os.getppid() == parent:
        # The kernel signals when the parent's *thread* ends, so the handler looks whether the process did.
        signal.signal(signal.SIGUSR2, lambda *_: server.stop() if gone() else None)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)
