"""A scripted engine as a process of its own, which can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from fakes.ports import claim

SCRIPT = """
import sys, threading
from fakes.engine import ScriptedEngine
engine = ScriptedEngine()
engine.port = int(sys.argv[1])
with engine:
    engine.delay_s = float(sys.argv[2])
    print(engine.port, flush=True)
    threading.Event().wait()
"""


class EngineProcess:
    """Gives the default answers of a `ScriptedEngine`, each after `delay_s`. Started on entering, killed on leaving."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self._claim = claim()
        self.port: int = self._claim.getsockname()[1]
        self._delay_s = delay_s

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """On the same port as before."""
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        argv = [sys.executable, "-c", SCRIPT, str(self.port), str(self._delay_s)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout is not None
        assert int(self._process.stdout.readline()) == self.port

    def kill(self) -> None:
        """SIGKILL: the kernel resets its connections."""
        self._process.kill()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.kill()
        self._claim.close()
