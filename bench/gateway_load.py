"""Calls a gateway over a fixed number of connections for a while, each of them one call after the other.

    python bench/gateway_load.py URL --connections 16 --seconds 3 [--stream] [--fresh] [--header "name: value"]
        [--store FILE]

Prints one line of JSON. It is a process of its own, so that its CPU time is not counted as the gateway's. Every request
differs in a number, as those of agents differ in their last message; with --fresh in one in each message, so that no
text of it was ever sent before. With --store each stream's ``[DONE]`` is checked:
once it has come, the store, read over a connection of its own, holds at least as many calls as streams have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

MARK = b"00000000"


def request_body(*, stream: bool, fresh: bool = False) -> bytes:
    """About 2,000 tokens: an agent's conversation of 8 KB. `MARK` stands in the last message, or in each."""
    turn = "Observation: the command exited with status 0 and printed 'ok: 14 tests passed in 3.21s'. "
    turn += "Next, read file src/app.py and fix it. "
    messages = [{"role": "system", "content": "You are an agent. " * 20}]
    for number in range(14):
        messages.append({"role": "assistant" if number % 2 else "user", "content": turn * 4})
    for message in messages if fresh else messages[-1:]:
        message["content"] += f"Call {MARK.decode()}."
    asked = {"model": "mock", "messages": messages, "max_tokens": 200, "logprobs": True, "top_logprobs": 2}
    return json.dumps({**asked, "stream": stream}, separators=(",", ":")).encode()


@dataclass(kw_only=True)
class Tally:
    seconds: list[float] = field(default_factory=list)
    """How long each call took."""
    first: list[float] = field(default_factory=list)
    """Time to the first event of each stream."""
    errors: int = 0
    events: set[int] = field(default_factory=set)
    """Numbers of events that streams had."""
    chunks: set[int] = field(default_factory=set)
    """Numbers of HTTP chunks that streams came in."""
    texts: set[str] = field(default_factory=set)
    """What streams said, as `text_hash` of their events."""
    undone: int = 0
    """Streams without ``[DONE]``."""
    early: int = 0
    """Streams whose ``[DONE]`` came before their call was in the store."""


class Caller(asyncio.Protocol):
    """One connection. `go_on` says whether another call is to be made."""

    def __init__(self, make: Callable[[], bytes], go_on: Callable[[], bool], tally: Tally, check: Callable[[], bool]):
        self.ended = asyncio.get_running_loop().create_future()
        self._make = make
        self._go_on = go_on
        self._tally = tally
        self._check = check
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._tally.errors += 1
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def _next(self) -> None:
        assert self._transport is not None
        if not self._go_on():
            if not self.ended.done():
                self.ended.set_result(None)
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._chunks = 0
        self._streamed = False
        self._first = 0.0
        request = self._make()
        self._began = time.perf_counter()
        self._transport.write(request)

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type" and value.startswith(b"text/event-stream"):
            self._streamed = True

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, data: bytes) -> None:
        if self._streamed:
            if not self._first:
                self._first = time.perf_counter() - self._began
            self._parts.append(data)
            if data.endswith(b"data: [DONE]\n\n") and not self._check():
                self._tally.early += 1

    def on_message_complete(self) -> None:
        tally = self._tally
        tally.seconds.append(time.perf_counter() - self._began)
        if self._parser.get_status_code() != 200:
            tally.errors += 1
        if self._streamed:
            self._end_of_stream()
        self._next()

    def _end_of_stream(self) -> None:
        tally = self._tally
        events = b"".join(self._parts).split(b"\n\n")[:-1]
        tally.first.append(self._first)
        tally.events.add(len(events))
        tally.chunks.add(self._chunks - 1)  # the empty one at the end is none
        if not events or events[-1] != b"data: [DONE]":
            tally.undone += 1
        if len(tally.first) <= 32:  # to parse them all would take more CPU than the gateway does
            tally.texts.add(text_hash(events[:-1]))


def text_hash(events: Sequence[bytes]) -> str:
    """Of what each event says, so that two events made one differ from two."""
    said = [json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]["content"] for event in events]
    return hashlib.sha256("\0".join(said).encode()).hexdigest()


@contextlib.contextmanager
def store_check(path: Path | None, tally: Tally) -> Iterator[Callable[[], bool]]:
    """Whether the calls that have ended are in the store, the one whose end has just come among them."""
    if path is None:
        yield lambda: True
        return
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as store:

        def newest() -> int:
            return int(store.execute("SELECT coalesce(max(seq), 0) FROM calls").fetchone()[0])

        before = newest()
        yield lambda: newest() - before > len(tally.first)


async def load(
    url: str, headers: list[str], connections: int, seconds: float, body: bytes, store: Path | None
) -> Tally:
    parts = urlsplit(url)
    lines = [f"POST {parts.path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json"]
    lines += [f"content-length: {len(body)}", *headers]
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    between = body.split(MARK)
    number = 0
    tally = Tally()
    deadline = time.perf_counter() + seconds

    def make() -> bytes:
        nonlocal number
        number += 1
        return head + (b"%08d" % number).join(between)

    with store_check(store, tally) as check:
        loop = asyncio.get_running_loop()
        callers = []
        for _ in range(connections):
            _, caller = await loop.create_connection(
                lambda: Caller(make, lambda: time.perf_counter() < deadline, tally, check),
                parts.hostname or "",
                parts.port or 80,
            )
            callers.append(caller)
        await asyncio.wait_for(asyncio.gather(*(caller.ended for caller in callers)), seconds + 120)
    return tally


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "calls": len(tally.seconds),
        "per_s": len(tally.seconds) / seconds,
        "p50_ms": _median_ms(tally.seconds),
        "errors": tally.errors,
    }
    if tally.first:
        found |= {"first_ms": _median_ms(tally.first), "events": sorted(tally.events), "chunks": sorted(tally.chunks)}
        found |= {"texts": sorted(tally.texts), "undone": tally.undone, "early": tally.early}
    return found


def _median_ms(values: list[float]) -> float:
    return 1000 * statistics.median(values) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="not only the last message differs from call to call")
    parser.add_argument("--header", action="append", default=[])
    parser.add_argument("--store", type=Path, help="the gateway's SQLite file")
    given = parser.parse_args()
    began = time.perf_counter()
    body = request_body(stream=given.stream, fresh=given.fresh)
    tally = asyncio.run(load(given.url, given.header, given.connections, given.seconds, body, given.store))
    print(json.dumps(summary(tally, time.perf_counter() - began)))


if __name__ == "__main__":
    main()
