"""The control side of an embedded engine, spoken over HTTP. Imports neither torch nor the server."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path

from outrider.errors import EngineError, SetupError
from outrider.types import Json

POLL_S = 0.1
LOG_LINES = 15


class EmbeddedEngine:
    """Satisfies `outrider.protocols.Engine` for a server at `base_url` (without ``/v1``). Thread-safe.

    `log` is the file that the server's output goes to and `exit_code` tells how its process ended (None while it runs,
    as ``Popen.poll`` does); both are for a start that fails.
    """

    def __init__(
        self,
        base_url: str,
        *,
        log: Path | None = None,
        exit_code: Callable[[], int | None] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._log = log
        self._exit_code = exit_code
        self._timeout_s = timeout_s

    @property
    def base_url(self) -> str:
        return self._base_url

    def wait_ready(self, timeout_s: float) -> None:
        """Return when ``/health`` answers 200. Raises `SetupError` with the engine's last log lines."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._call("GET", "/health", timeout_s=5.0)
                return
            except EngineError as error:
                reason = str(error)
            code = self._exit_code() if self._exit_code is not None else None
            if code is not None:
                raise SetupError(f"The engine ended with status {code} before it was ready.{self._last_lines()}")
            if time.monotonic() >= deadline:
                raise SetupError(f"The engine was not ready within {timeout_s:g} s: {reason}{self._last_lines()}")
            time.sleep(POLL_S)

    def load_weights(self, path: Path, version: int) -> None:
        """Serve the weights in `path` as policy `version`. Raises `EngineError`; then the old weights still serve."""
        body: Json = {"path": str(Path(path).resolve()), "version": version}
        self._call("POST", "/control/load_weights", body, timeout_s=max(self._timeout_s, 300.0))

    def version(self) -> int:
        return int(self._call("GET", "/control/version")["version"])

    def pause(self) -> None:
        """Admit no further request; those that run go on to their end."""
        self._call("POST", "/control/pause")

    def resume(self) -> None:
        self._call("POST", "/control/resume")

    def reset_prefix_cache(self) -> None:
        self._call("POST", "/control/reset_prefix_cache")

    def stats(self) -> Json:
        """Counters of the scheduler: running, waiting, tokens computed, tokens taken from the prefix cache, …"""
        return self._call("GET", "/control/stats")

    def _call(self, method: str, route: str, body: Json | None = None, *, timeout_s: float | None = None) -> Json:
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._base_url + route, data=data, method=method, headers={"content-type": "application/json"}
        )
        # No proxy from the environment: the engine is ours, and usually on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout_s or self._timeout_s) as response:
                found = json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(f"{method} {route}: {error.code}: {_message(error.read())}") from None
        except (OSError, ValueError) as error:
            raise EngineError(f"{method} {route}: no usable answer from {self._base_url}: {error}") from error
        return found if isinstance(found, dict) else {}

    def _last_lines(self) -> str:
        if self._log is None or not self._log.is_file():
            return ""
        with self._log.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, maxlen=LOG_LINES)
        return f" Last lines of {self._log}:\n{''.join(lines).rstrip()}"


def _message(body: bytes) -> str:
    """The message of an error body in OpenAI's shape, else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")
