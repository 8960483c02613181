"""What `gateway.py` measures: outrider in its modes, and beside it what forwards the same calls, each as a process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from outrider.keys import hash_key, new_key
from outrider.stores import open_store
from outrider.types import Mode, Session

HERE = Path(__file__).resolve().parent
CHAT = "/v1/chat/completions"
START_TIMEOUT_S = 90.0


@dataclass(kw_only=True)
class Target:
    name: str
    url: str
    process: subprocess.Popen[bytes]
    store: Path | None = None
    headers: list[str] = field(default_factory=list)

    def cpu_s(self) -> float:
        """User and system time of the process and all it started."""
        return sum(times.user + times.system for times in (one.cpu_times() for one in self._tree()))

    def rss_mb(self) -> float:
        return sum(one.memory_info().rss for one in self._tree()) / 1e6

    def _tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(command: Sequence[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens on `port`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield process
    finally:
        _stop(process)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def upstream(*, gap_ms: float = 0.0) -> Iterator[Target]:
    """The model server itself, called directly."""
    command = [sys.executable, str(HERE / "gateway_upstream.py"), "--gap-ms", str(gap_ms)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield Target(name="direct", url=f"http://127.0.0.1:{port}{CHAT}", process=process)
    finally:
        _stop(process)
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def outrider(name: str, mode: Mode, base: str, folder: Path, *, synchronous: str = "FULL") -> Iterator[Target]:
    """A gateway with a store of its own, called under an attempt key in `train` and without one in the other modes."""
    store = folder / f"{name}.sqlite3"
    port = free_port()
    path = CHAT
    if mode is Mode.TRAIN:
        key = new_key()
        path = f"/s/{key}{CHAT}"
        with contextlib.closing(open_store(f"sqlite:///{store}")) as opened:
            opened.open_session(Session(attempt_id="bench", key_hash=hash_key(key), mode=mode))
    command = [sys.executable, "-m", "outrider", "gateway", "--upstream", base, "--port", str(port)]
    command += ["--store", f"sqlite:///{store}", "--mode", mode.value, "--store-synchronous", synchronous]
    with started(command, port, folder / f"{name}.log") as process:
        yield Target(name=name, url=f"http://127.0.0.1:{port}{path}", process=process, store=store)


@contextlib.contextmanager
def agentlightning(python: str, base: str, folder: Path) -> Iterator[Target]:
    """Its server with one model and one rollout, which records in memory."""
    port = free_port()
    command = [python, "-m", "agentlightning.server", "host=127.0.0.1", f"port={port}"]
    command += ["default_proxy.model_name=mock", f"hydra.run.dir={folder}/hydra"]
    with started(command, port, folder / "agl.log") as process:
        api = f"http://127.0.0.1:{port}/api"
        _post(f"{api}/models", [{"model": "mock", "endpoint": f"{base}/v1"}])
        made = _post(f"{api}/rollouts", [{"input": {"x": 1}}])
        rollout = made[0] if isinstance(made, list) else made
        id = rollout.get("rollout_id") or rollout["rollout"]["rollout_id"]
        path = f"/proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions"
        yield Target(name="agl", url=f"http://127.0.0.1:{port}{path}", process=process)


def _post(url: str, body: object) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.error;
events {{ worker_connections 2048; }}
http {{
    access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
    client_body_temp_path {folder}/n1; proxy_temp_path {folder}/n2; fastcgi_temp_path {folder}/n3;
    uwsgi_temp_path {folder}/n4; scgi_temp_path {folder}/n5;
    upstream model {{ server {host}; keepalive 256; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://model; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(binary: str, base: str, folder: Path) -> Iterator[Target]:
    """A plain proxy that records nothing."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, host=base.removeprefix("http://"), port=port))
    with started([binary, "-c", str(config)], port, folder / "nginx.log") as process:
        yield Target(name="nginx", url=f"http://127.0.0.1:{port}{CHAT}", process=process)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
