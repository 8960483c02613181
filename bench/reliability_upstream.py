"""A model server that answers at once with token ids and log-probs, in a process of its own, and fails when asked to.

    python bench/reliability_upstream.py [--tokens N] [--port P]

Prints its port. The answer's id holds the request's `user`, so that an answer which went astray shows. A field
`x_fault` in the body asks for trouble: ``silent`` (never a byte), ``hang`` (half an answer, then nothing), ``cut``
(half an answer, then a reset), ``endless`` (a whole answer that is never ended), ``slow`` (10 ms between chunks).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any, cast

import httptools

Json = dict[str, Any]


def plain_answer(user: str, tokens: int) -> bytes:
    logprobs = [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []} for _ in range(tokens)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "t" * tokens},
        "logprobs": {"content": logprobs},
        "finish_reason": "stop",
        "token_ids": list(range(100, 100 + tokens)),
    }
    return json.dumps(
        {
            "id": f"for-{user}",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [choice],
            "usage": {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens},
            "prompt_token_ids": list(range(8)),
        }
    ).encode()


def streamed_answer(user: str, tokens: int) -> list[bytes]:
    """One event for each token, one for the usage, and ``[DONE]``."""
    head = {"id": f"for-{user}", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
    events: list[Json] = []
    for at in range(tokens):
        choice: Json = {
            "index": 0,
            "delta": {"content": "t"},
            "logprobs": {"content": [{"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}]},
            "token_ids": [100 + at],
            "finish_reason": "stop" if at == tokens - 1 else None,
        }
        events.append(head | {"choices": [choice]} | ({} if at else {"prompt_token_ids": list(range(8))}))
    numbers = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": 8 + tokens}
    events.append(head | {"choices": [], "usage": numbers})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


class Connection(asyncio.Protocol):
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        try:
            asked = json.loads(body) if body else {}
        except ValueError:
            asked = {}
        self._task = asyncio.create_task(self._answer(asked if isinstance(asked, dict) else {}))

    async def _answer(self, asked: Json) -> None:
        transport, fault = self._transport, asked.get("x_fault")
        assert transport is not None
        if fault == "silent":
            return
        user = str(asked.get("user"))
        if asked.get("stream"):
            parts = [b"%x\r\n%s\r\n" % (len(event), event) for event in streamed_answer(user, self._tokens)]
            kind, framing, end = b"text/event-stream", b"transfer-encoding: chunked", b"0\r\n\r\n"
        else:
            body = plain_answer(user, self._tokens)
            parts = [body[: len(body) // 2], body[len(body) // 2 :]]
            kind, framing, end = b"application/json", b"content-length: %d" % len(body), b""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%s\r\n\r\n" % (kind, framing)
        if fault is None:
            transport.write(head + b"".join(parts) + end)
            return
        transport.write(head)
        for part in parts[: len(parts) // 2] if fault in ("hang", "cut") else parts:
            transport.write(part)
            await asyncio.sleep(0.01)
        if fault == "cut":
            transport.abort()
        elif fault == "slow":
            transport.write(end)


async def serve(tokens: int, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(tokens), "127.0.0.1", port, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    try:
        asyncio.run(serve(given.tokens, given.port))
    except KeyboardInterrupt:
        sys.exit(130)
