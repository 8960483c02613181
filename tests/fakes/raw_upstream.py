"""An upstream that answers with hand-written bytes on a real socket, for what no HTTP server would send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Bytes written one by one, then what happens to the connection."""

    parts: Sequence[bytes] = ()
    end: Literal["keep", "close", "reset"] = "close"


def http(body: bytes, *, kind: str = "application/json", length: int | None = None, status: str = "200 OK") -> bytes:
    """A whole answer; `length` is what it claims to have, where that is not the truth."""
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode() + body


def chunked_head(kind: str = "text/event-stream") -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def piece(data: bytes) -> bytes:
    """One chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class RawUpstream:
    """Gives each request the next of `answers`, and the last one ever after. Serves from threads of its own."""

    def __init__(self, *answers: Raw) -> None:
        self.answers = deque(answers)
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(made)
            self._threads.append(threading.Thread(target=self._serve, args=(made,), daemon=True))
            self._threads[-1].start()

    def _serve(self, made: socket.socket) -> None:
        with made, contextlib.suppress(OSError):
            while _read_request(made):
                self.requests += 1
                answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
                for part in answer.parts:
                    made.sendall(part)
                    time.sleep(0.02)  # so that parts arrive one by one, and before what ends them
                if answer.end == "reset":
                    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if answer.end != "keep":
                    return


def _read_request(made: socket.socket) -> bool:
    data = b""
    while b"\r\n\r\n" not in data:
        got = made.recv(65536)
        if not got:
            return False
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    left = int(lengths[0].partition(b":")[2]) - len(body) if lengths else 0
    while left > 0:
        got = made.recv(65536)
        if not got:
            return False
        left -= len(got)
    return True
