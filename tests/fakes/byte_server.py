"""An upstream that answers with hand-written bytes in the test's own event loop."""

from __future__ import annotations

import asyncio

from outrider.gateway.upstreams.errors import Timeouts
from outrider.gateway.upstreams.upstream import Upstream


class Server:
    """Answers each request with the next script: bytes to write, a number of seconds to wait, "close", or a function
    to call."""

    def __init__(self, *scripts, timeouts=Timeouts(total_s=20)):
        self.scripts = list(scripts)
        self.timeouts = timeouts
        self.requests = []
        self.connections = 0
        self.lost = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.upstream = Upstream(url, timeouts=self.timeouts)
        return self

    async def __aexit__(self, *error):
        self.upstream.close()
        self._server.close()
        await self._server.wait_closed()
        await asyncio.sleep(0.05)

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                body = await reader.readexactly(int(length[0].split()[1])) if length else b""
                self.requests.append((head, body))
                for step in self.scripts.pop(0):
                    if step == "close":
                        return
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    elif callable(step):
                        step()
                    else:
                        writer.write(step)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
        finally:
            writer.close()


OK = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"]


async def fetch(server, method="POST", body=b"x"):
    call = server.upstream.call(method, b"/v1/x?q=1", [(b"x-a", b"b")], body)
    await call.start()
    return call.status, await call.read()
