"""A plain TCP load balancer: each connection goes to the next backend in turn that takes it, and stays there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from typing import Self


class Balancer:
    """Serves from a thread of its own until left."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = list(ports)
        """Of the backends; may be changed at any time."""
        self.port = 0
        self.sent = dict.fromkeys(ports, 0)
        """Connections that each backend got."""
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer", daemon=True)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(len(self.ports)):
            self._turn += 1
            port = self.ports[self._turn % len(self.ports)]
            try:
                from_backend, to_backend = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            self.sent[port] = self.sent.get(port, 0) + 1
            ways = [asyncio.create_task(_pump(reader, to_backend)), asyncio.create_task(_pump(from_backend, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
                to_backend.transport.abort()
            return


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()  # what is written still goes out
        await writer.wait_closed()
