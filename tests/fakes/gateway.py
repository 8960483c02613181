"""A gateway in a thread of the test process, and agents' calls to it over real HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvicorn

from fakes.engine import ScriptedEngine
from outrider.gateway.app import GatewayOptions, GatewayServer, server_config
from outrider.gateway.client import GatewayClient
from outrider.gateway.exchange import Receive, Scope, Send
from outrider.gateway.options import load_dialects, open_store
from outrider.gateway.router import Gateway
from outrider.keys import hash_key, new_key
from outrider.protocols import Store
from outrider.types import Call, Json, Mode, Session

ADMIN_KEY = "ora-test-0123456789abcdef"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True, kw_only=True)
class Got:
    """An answer as the agent got it."""

    status: int
    headers: dict[str, str]
    body: bytes
    clean: bool = True
    """False where the connection closed in the middle of the body."""

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found

    @property
    def events(self) -> list[Any]:
        """Data of an event stream: JSON, or ``[DONE]``."""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]


class RunningGateway:
    """Starts on entering; `options` go to `GatewayOptions`."""

    def __init__(self, engine: ScriptedEngine, path: Path, **options: Any) -> None:
        self.server = GatewayServer(make_options(engine, path, **options))
        self._app: Gateway = self.server._gateway
        self.store: Store = self.server.store
        self._at(self.server.port)
        self._thread = threading.Thread(target=self.server.run, name="gateway", daemon=True)

    def _at(self, port: int) -> None:
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}"
        self.client = GatewayClient(self.base_url, ADMIN_KEY)

    def __enter__(self) -> Self:
        self._thread.start()
        self.client.wait_ready(30)
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def open(self, attempt_id: str = "attempt-1", *, mode: Mode = Mode.TRAIN, **fields: Any) -> str:
        """Open a session; returns its key."""
        key = new_key()
        self.store.open_session(Session(attempt_id=attempt_id, key_hash=hash_key(key), mode=mode, **fields))
        return key

    def post(self, path: str, body: Json | bytes, headers: dict[str, str] | None = None) -> Got:
        return self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def chat(self, key: str, **fields: Any) -> Got:
        """One chat call with the key in the path."""
        return self.post(f"/s/{key}{CHAT}", {"model": "policy", "messages": MESSAGES, **fields})

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            try:
                data, clean = answer.read(), True
            except http.client.IncompleteRead as error:
                data, clean = error.partial, False
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Got(status=answer.status, headers=names, body=data, clean=clean)
        finally:
            connection.close()

    def open_socket(self, path: str, body: Json) -> socket.socket:
        """Send a request by hand and leave the answer on the wire."""
        data = json.dumps(body).encode()
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        raw.sendall(b"POST %s HTTP/1.1\r\nhost: gw\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        return raw

    def replica_states(self) -> list[Json]:
        return self._app.replica_states()

    def recorded(self, count: int = 1, attempt_id: str = "attempt-1") -> list[Call]:
        """The calls of an attempt, once there are `count`."""
        wait_for(lambda: len(self.store.calls(attempt_id)) >= count)
        found = self.store.calls(attempt_id)
        assert len(found) == count
        return found

    def call(self, attempt_id: str = "attempt-1") -> Call:
        """The only call of an attempt."""
        return self.recorded(1, attempt_id)[0]


class Host:
    """One server for many gateways, one after another: starting and ending uvicorn takes longer than most tests."""

    def __init__(self) -> None:
        self.app: Gateway | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(server_config(self))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="host", daemon=True)
        self._thread.start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        assert self.app is not None
        await self.app(scope, receive, send)

    def end(self) -> None:
        """The present gateway closes its connections."""
        if self._loop is not None and self.app is not None:
            asyncio.run_coroutine_threadsafe(self._close(self.app), self._loop).result(30)

    async def _close(self, app: Gateway) -> None:
        app.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


class HostedGateway(RunningGateway):
    """The same as a `RunningGateway`, served by a `Host`."""

    def __init__(self, host: Host, engine: ScriptedEngine, path: Path, **options: Any) -> None:
        self._host = host
        made = make_options(engine, path, **options)
        self.store = open_store(made.store, synchronous="NORMAL")
        self._app = Gateway(made, self.store, load_dialects(made.dialects, made.upstream_dialects))
        self._at(host.port)

    def __enter__(self) -> Self:
        self._host.app = self._app
        return self

    def __exit__(self, *error: object) -> None:
        self._host.end()
        self.store.close()


def make_options(engine: ScriptedEngine, path: Path, **options: Any) -> GatewayOptions:
    defaults: dict[str, Any] = {
        "upstream": engine.base_url,
        "store": f"sqlite:///{path}",
        "admin_key": ADMIN_KEY,
        "port": 0,
        "upstream_retries": 0,
    }
    return GatewayOptions(**(defaults | options))


def wait_for(condition: Callable[[], Any], timeout_s: float = 50.0) -> None:
    """Return when `condition` holds; fail loudly if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)
