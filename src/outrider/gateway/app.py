"""Runs the gateway as a process: binds the port, says when it is ready, finishes streams before it ends.

At SIGTERM or Ctrl-C it refuses new calls with 503 and ends when those under way have ended, or are cut at
``drain_timeout_s``. A second signal cuts them at once.

Entry points: `GatewayOptions` and `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType

import psutil
import uvicorn

from outrider.errors import SetupError
from outrider.gateway.connection import connection_class
from outrider.gateway.exchange import Receive, Scope, Send
from outrider.gateway.options import GatewayOptions, check_options, load_dialects, open_store
from outrider.gateway.router import Gateway
from outrider.gateway.telemetry.logs import LineHandler, LogWriter
from outrider.types import Mode

__all__ = ["GatewayOptions", "GatewayServer", "serve"]

KEEP_ALIVE_S = 75  # longer than common clients keep idle connections, so that they close first
PARENT_POLL_S = 0.5


def _about(mode: Mode) -> str:
    """What becomes of calls, for whoever starts a gateway and forgot to say."""
    if mode == Mode.PASSTHROUGH:
        return "nothing is kept (--mode record keeps calls)"
    return "calls are kept" if mode == Mode.RECORD else "calls need an attempt key (POST /admin/attempts)"


class GatewayServer:
    """A bound, not yet serving gateway. `run` blocks until `stop` is called, a signal comes or the parent has gone."""

    def __init__(self, options: GatewayOptions, log_writer: LogWriter | None = None) -> None:
        check_options(options)  # before anything is opened
        dialects = load_dialects(options.dialects, options.upstream_dialects)
        self._socket = _bind(options.host, options.port)
        try:
            self.store = open_store(options.store, synchronous=options.store_synchronous)
            try:
                self._gateway = Gateway(options, self.store, dialects, log_writer)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.base_url = f"http://{host}:{self.port}"
        message = f"outrider gateway: mode {options.mode}, {_about(options.mode)}; ready on {self.base_url}"
        if options.mode in (Mode.PASSTHROUGH, Mode.RECORD) and not options.takes_unkeyed:
            message += (
                "\noutrider gateway: calls without an attempt key are refused (--unkeyed "
                f"{options.unkeyed}); --unkeyed allow lets everybody in who reaches this address"
            )
        config = server_config(
            self._gateway, header_timeout_s=options.header_timeout_s, idle_timeout_s=options.idle_timeout_s
        )
        self._server = _Server(config, options.parent_pid, message, self._gateway)

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self.store.close()

    def stop(self) -> None:
        """Take no new connections, finish what is in flight, end. From any thread."""
        self._server.should_exit = True

    @property
    def ready(self) -> bool:
        return self._server.started


def server_config(
    app: Callable[[Scope, Receive, Send], Awaitable[None]],
    *,
    header_timeout_s: float = 30.0,
    idle_timeout_s: float = 60.0,
) -> uvicorn.Config:
    """How uvicorn serves a gateway: nothing of its own in an answer, no log of paths, which hold keys."""
    return uvicorn.Config(
        app,
        http=connection_class(header_timeout_s=header_timeout_s, idle_timeout_s=idle_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class _Server(uvicorn.Server):
    """uvicorn with our own start message and signals: its own handlers raise the signal again at the end."""

    def __init__(self, config: uvicorn.Config, parent_pid: int, message: str, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._parent_pid = parent_pid
        self._message = message
        self._parent_watch: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._gateway.begin()
        if self._parent_pid:
            self._parent_watch = asyncio.create_task(self._watch_parent())
        sys.stderr.write(self._message + "\n")
        sys.stderr.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets=sockets)
        if self._parent_watch is not None:
            self._parent_watch.cancel()
        await self._gateway.end()
        self._gateway.close()
        await asyncio.sleep(0)  # lets closed connections leave the loop

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._loop is None or self._signals > 1:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._drain = asyncio.create_task(self._end_in_peace())

    async def _end_in_peace(self) -> None:
        if not await self._gateway.drain():
            self.force_exit = True
        self.should_exit = True

    async def _watch_parent(self) -> None:
        # Not PR_SET_PDEATHSIG: the kernel ties that to the thread that started us, which may end before its process.
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._parent_pid)
            while parent.is_running() and parent.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(PARENT_POLL_S)
        self.should_exit = True


def serve(options: GatewayOptions) -> None:
    """Run a gateway until it is told to stop. Raises `ConfigError`, `SetupError`, `StoreError` at the start."""
    writer = LogWriter()
    server = GatewayServer(options, writer)
    handler = LineHandler(writer, format=options.log_format)
    logger = logging.getLogger("outrider")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if options.log_level == "info" else logging.WARNING)
    # A call makes many short-lived containers and no cycles. By default the collector walks them all, time and again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    _take_all_files()
    try:
        server.run()
    finally:
        logger.removeHandler(handler)
        writer.close()


def _take_all_files() -> None:
    """Each call under way holds two sockets, and the usual soft limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SetupError(f"gateway.host: cannot listen on {host!r}: {error}.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # uvicorn listens only once the loop runs; listening now makes a second gateway on this port fail at its start.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise SetupError(
            f"gateway.port: cannot listen on {host}:{port}: {error.strerror}. Stop what uses it or choose another."
        ) from error
    bound.setblocking(False)
    return bound
