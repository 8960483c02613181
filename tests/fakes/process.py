"""A gateway as a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from fakes.engine import ScriptedEngine
from fakes.gateway import ADMIN_KEY
from outrider.gateway.client import GatewayClient

SCRIPT = """
import json, sys
from outrider.errors import OutriderError
from outrider.gateway.app import GatewayOptions, serve
from outrider.types import Mode
options = json.loads(sys.argv[1])
try:
    serve(GatewayOptions(**(options | {"mode": Mode(options["mode"])})))
except OutriderError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class GatewayProcess:
    """Started on entering, killed on leaving."""

    def __init__(self, engine: ScriptedEngine, path: Path, **options: Any) -> None:
        defaults = {
            "upstream": engine.base_url,
            "store": f"sqlite:///{path}",
            "admin_key": ADMIN_KEY,
            "mode": "train",
            "port": 0,
            "upstream_retries": 0,
        }
        self._options = defaults | options
        self.base_url = ""
        self.port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        argv = [sys.executable, "-c", SCRIPT, json.dumps(self._options)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert "ready on http://" in line, line + self.process.stderr.read()
        self.base_url = line.rpartition(" ")[2].strip()
        self.port = int(self.base_url.rpartition(":")[2])
        self.client = GatewayClient(self.base_url, ADMIN_KEY)

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status
