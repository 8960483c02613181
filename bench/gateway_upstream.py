"""A model server with one fixed answer: 62 KB with 2,000 prompt ids, and 200 tokens with ids and log-probs (top 2).

    python bench/gateway_upstream.py [--gap-ms G]

Prints its port. Asked for a stream it sends 200 chunks and ``[DONE]``, each in a write and an HTTP chunk of its own,
G milliseconds apart. Nothing is parsed and nothing is made at a call, so that it takes little of a shared machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from typing import Any, cast

PROMPT_IDS, TOKENS, TOP = 2000, 200, 2
WORDS = (" the", " agent", " calls", " tool", " with", " value", ",", ".", " and", " result", " 42", "\n")
HIGHEST_ID = 151_000

Json = dict[str, Any]


def answers() -> tuple[bytes, list[bytes]]:
    """The whole answer, and the events of the streamed one."""
    source = random.Random(7)
    prompt = [source.randrange(HIGHEST_ID) for _ in range(PROMPT_IDS)]
    ids = [source.randrange(HIGHEST_ID) for _ in range(TOKENS)]
    words = [source.choice(WORDS) for _ in range(TOKENS)]
    entries = [_entry(source, word) for word in words]
    usage = {"prompt_tokens": PROMPT_IDS, "completion_tokens": TOKENS, "total_tokens": PROMPT_IDS + TOKENS}
    head = {"id": "chatcmpl-1", "created": 1764500000, "model": "mock"}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(words)},
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    events = []
    for at, (token, word, entry) in enumerate(zip(ids, words, entries, strict=True)):
        last = at == TOKENS - 1
        delta = {
            "index": 0,
            "delta": {"content": word},
            "logprobs": {"content": [entry]},
            "finish_reason": "stop" if last else None,
            "token_ids": [token],
        }
        chunk: Json = {**head, "object": "chat.completion.chunk", "choices": [delta]}
        chunk |= {"usage": usage} if last else {}
        chunk |= {} if at else {"prompt_token_ids": prompt}
        events.append(b"data: " + _compact(chunk) + b"\n\n")
    return _compact(whole), [*events, b"data: [DONE]\n\n"]


def _entry(source: random.Random, word: str) -> Json:
    spelled = list(word.encode())
    top = [{"bytes": spelled, "logprob": -5 * source.random(), "token": f"{word}{number}"} for number in range(TOP)]
    return {"bytes": spelled, "logprob": -2 * source.random(), "token": word, "top_logprobs": top}


def _compact(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Connection(asyncio.Protocol):
    """One call at a time, as its clients do."""

    def __init__(self, whole: bytes, events: list[bytes], gap_s: float) -> None:
        self._whole = whole
        self._events = events
        self._gap_s = gap_s
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head):
            return
        self._received = b""
        assert self._transport is not None
        if b'"stream":true' in body or b'"stream": true' in body:
            self._task = asyncio.get_running_loop().create_task(self._stream())
        else:
            self._transport.write(self._whole)

    async def _stream(self) -> None:
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for event in self._events:
            self._transport.write(event)
            await asyncio.sleep(self._gap_s)
        self._transport.write(b"0\r\n\r\n")


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return 0


async def serve(gap_s: float) -> None:
    body, events = answers()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    framed = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(head + body, framed, gap_s), "127.0.0.1", 0, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="time between two chunks of a stream")
    try:
        asyncio.run(serve(parser.parse_args().gap_ms / 1000))
    except KeyboardInterrupt:
        sys.exit(130)
