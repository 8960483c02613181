"""Our end of `forkserver.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outrider.types import Json

SCRIPT = Path(__file__).with_name("forkserver.py")
SAID_BYTES = 4096
CLOSE_TIMEOUT_S = 5.0


class ForkServer:
    """Starts one and talks to it. Raises `OSError` where the interpreter cannot be started."""

    def __init__(self, interpreter: str, *, first_path: Path, preload: Sequence[str], env: Mapping[str, str]) -> None:
        self._send_lock = threading.Lock()
        self._said = bytearray()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [interpreter, str(SCRIPT), str(theirs.fileno()), str(first_path), *preload],
                    pass_fds=[theirs.fileno()],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._socket = ours
        self._reader = threading.Thread(target=self._read_stderr, name="fork server stderr", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Json) -> None:
        """Raises `OSError` when the server is gone. It works off messages in order."""
        with self._send_lock:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[Json]:
        """What it says until it ends."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    if line.endswith(b"\n"):
                        yield json.loads(line)
        except OSError:
            return

    def epitaph(self) -> str:
        """How it ended and its last words, once `messages` has run dry."""
        status = self._await_end()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        said = bytes(self._said).decode("utf-8", "replace").strip()
        return f"the fork server ended with {how}" + (f"; it said: {said}" if said else "")

    def kill(self) -> None:
        """Kill it at once; the kernel kills its children."""
        self._process.kill()

    def close(self) -> None:
        """Close the channel, upon which the server kills its children and leaves; make sure of it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._await_end()
        self._socket.close()

    def _await_end(self) -> int:
        try:
            status = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join(1)
        return status

    def _read_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with stream:
            while data := os.read(stream.fileno(), 4096):
                self._said = (self._said + data)[-SAID_BYTES:]


def check(interpreter: str, job: Json, *, env: Mapping[str, str], timeout_s: float) -> str:
    """What keeps `job` from being started under `interpreter`; ``""`` if nothing."""
    try:
        done = subprocess.run(
            [interpreter, str(SCRIPT), "--check"],
            input=json.dumps(job),
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
        return str(json.loads(done.stdout))
    except OSError as error:
        return f"the interpreter {interpreter} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"the harness did not import within {timeout_s:g} s"
    except ValueError:
        return f"{interpreter} cannot run the fork server: {done.stderr.strip()[-500:]}"
