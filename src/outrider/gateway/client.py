"""The trainer's client of a gateway: the standard library's HTTP, no event loop."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any
from urllib.parse import quote, urlsplit

from outrider.errors import EngineError, SetupError
from outrider.types import Json


class GatewayClient:
    """Satisfies `protocols.GatewayControl`. One connection a request, so that a restarted gateway is found again.

    Raises `EngineError` when the gateway can't be reached or refuses: the model can't be had then, and trying again
    may help.
    """

    def __init__(self, base_url: str, admin_key: str, *, timeout_s: float = 10.0) -> None:
        parts = urlsplit(base_url)
        self.base_url = base_url
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._admin_key = admin_key
        self._timeout_s = timeout_s

    def health(self) -> Json:
        """``status``, ``paused``, ``in_flight``, ``policy_version``."""
        return self._request("GET", "/health")

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the gateway serves. Raises `SetupError` after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.health()
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise SetupError(f"the gateway did not come up within {timeout_s:g} s: {error}") from error
            time.sleep(0.05)

    def pause(self, timeout_s: float) -> int:
        """Hold new calls back and wait until those in flight have ended; returns how many have not."""
        answer = self._request("POST", "/admin/pause", {"timeout_s": timeout_s}, wait_s=timeout_s)
        return int(answer["in_flight"])

    def resume(self, version: int) -> None:
        """Admit calls again, recorded under policy `version`; the store keeps it."""
        self._request("POST", "/admin/resume", {"version": version})

    def open_attempt(self, attempt_id: str = "", **fields: Any) -> Json:
        """Open an attempt under a key of its own; `fields` are those of `attempts.OpenAttempt`."""
        return self._request("POST", "/admin/attempts", {"id": attempt_id, **fields})

    def seal_attempt(self, attempt_id: str) -> None:
        """End an attempt: its key opens nothing any more."""
        self._request("POST", f"/admin/attempts/{quote(attempt_id, safe='')}/seal")

    def attempt(self, attempt_id: str) -> Json:
        """Whether it is sealed, its calls in numbers, its rewards."""
        return self._request("GET", f"/admin/attempts/{quote(attempt_id, safe='')}")

    def stats(self) -> Json:
        """Counters since the gateway's start: calls, broken ones by kind, refusals by code, calls not recorded."""
        return self._request("GET", "/admin/stats")

    def _request(self, method: str, path: str, body: Json | None = None, *, wait_s: float = 0.0) -> Json:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s + wait_s)
        headers = {"authorization": f"Bearer {self._admin_key}"} if path.startswith("/admin/") else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            found: Json = json.loads(text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"the gateway at {self.base_url} cannot be reached: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise EngineError(f"the gateway refused {method} {path}: {answer.status} {text.decode('utf-8', 'replace')}")
        return found
