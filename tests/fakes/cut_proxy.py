"""A TCP proxy before a Unix socket that can be told to lose what one side said."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path


class CutProxy:
    """Forwards bytes both ways. With `swallow` set, it forwards the next message that holds those bytes to the server,
    waits until the server has answered, keeps the answer to itself and cuts all connections: the client can't know
    what became of what it sent. `up` false refuses new connections."""

    def __init__(self, target: Path) -> None:
        self.swallow: bytes | None = None
        self.swallowed = threading.Event()
        self.up = True
        self._target = str(target)
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.up = False
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self.up:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._target)
            with self._lock:
                self._open += [client, server]
            ends = threading.Event()
            for source, sink, sends in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, sink, sends, ends))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, sends: bool, ends: threading.Event) -> None:
        muted = False
        while data := _received(source):
            if sends and self.swallow is not None and self.swallow in data:
                self.swallow = None
                ends.set()  # tells the other direction to keep the answer to itself
            elif not sends and ends.is_set():
                muted = True
                break
            with contextlib.suppress(OSError):
                sink.sendall(data)
        if muted:
            self.swallowed.set()
            self.cut()
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        if not sends:
            with self._lock:
                self._open = [one for one in self._open if one not in (source, sink)]
            source.close()
            sink.close()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except OSError:
        return b""


@contextlib.contextmanager
def cut_proxy(target: Path) -> Iterator[CutProxy]:
    proxy = CutProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
