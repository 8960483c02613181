"""Broken requests over raw sockets, and a broken upstream behind them: no 500, no crash, no clean answer that is wrong.

Requests are those that harnesses sent (`tests/dialects/data`), changed in structure, in bytes, in their headers, paths
and framing, and pipelined. The upstream answers with JSON and event streams that are changed in the same ways, breaks
off, or sends what is no HTTP. Every seed is printed with what it found, so that it can be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from reliability_kill import sqlite_store
from reliability_rig import GatewayProcess, Link, Result, chat, open_sessions
from reliability_upstream import plain_answer, streamed_answer

from outrider.stores import open_store
from outrider.types import CallState, Fidelity

TESTS = Path(__file__).resolve().parent.parent / "tests"
WORKERS = 16
TIMEOUT_S = 20.0
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/messages/count_tokens")


class BrokenUpstream:
    """Answers each request wrongly, in ways that its seed decides. In this process, so that both sides are known."""

    def __init__(self, mutate: Any) -> None:
        self.port = 0
        self.calls = 0
        self.healthy = True
        """Whole answers only."""
        self._mutate = mutate
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                self.calls += 1
                if head.startswith(b"get "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                elif not await self._answer(writer, body, random.Random(self.calls)):
                    break
        writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes, chance: random.Random) -> bool:
        """Returns whether the connection may be used again."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):  # what is not recorded passes through as it is
            asked = None
        asked = asked if isinstance(asked, dict) else {}
        user, streamed = str(asked.get("user")), bool(asked.get("stream"))
        kind = b"text/event-stream" if streamed else b"application/json"
        if self.healthy:
            data = b"".join(streamed_answer(user, 4)) if streamed else plain_answer(user, 4)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(data)) + data
            )
            return True
        if streamed:
            events = [json.loads(event[6:]) for event in streamed_answer(user, 4)[:-1]]
            data = b"".join(self._mutate.broken_stream(events, chance))
        else:
            data = self._mutate.broken_json(json.loads(plain_answer(user, 4)), chance)
        status = chance.choice((200,) * 12 + (201, 204, 302, 400, 401, 429, 500, 503))
        head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(data))
        answer = head + data
        if chance.random() < 0.1:
            answer = self._mutate.mutate_bytes(answer, chance)
        writer.write(answer)
        await writer.drain()
        return False


def request(chance: random.Random, mutate: Any, recorded: list[Any], key: str) -> bytes:
    """The bytes of one request, or of several."""
    record = chance.choice(recorded)
    path = record["path"] if chance.random() < 0.9 else chance.choice(PATHS)
    body = mutate.broken_json(record["body"], chance) if chance.random() < 0.8 else json.dumps(record["body"]).encode()
    target = f"/s/{key}{path}".encode() if chance.random() < 0.8 else path.encode()
    if chance.random() < 0.1:
        target = mutate.mutate_bytes(target, chance)
    headers = [b"host: gw", b"content-type: application/json"]
    if chance.random() < 0.2:
        headers.append(b"authorization: Bearer " + chance.choice((key.encode(), b"x", b"\xff", b"")))
    if chance.random() < 0.3:
        name = chance.choice(
            (b"accept-encoding", b"content-encoding", b"x-outrider-trajectory", b"expect", b"connection")
        )
        value = chance.choice((b"gzip", b"zstd", b"br", b"100-continue", b"a/b", b"close", b"upgrade", b"\xff", b""))
        headers.append(name + b": " + value)
    if chance.random() < 0.2:
        chunks = [body[at : at + 1 + chance.randrange(4000)] for at in range(0, len(body), 4000)] or [b"x"]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks if chunk) + b"0\r\n\r\n"
        headers.append(b"transfer-encoding: chunked")
    else:
        framed = body
        headers.append(b"content-length: %d" % max(0, len(body) + chance.choice((0,) * 20 + (-1, 1, 5))))
    method = chance.choice((b"POST",) * 20 + (b"GET", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"x"))
    whole = method + b" " + target + b" HTTP/1.1\r\n" + b"\r\n".join(headers) + b"\r\n\r\n" + framed
    if chance.random() < 0.1:
        whole = mutate.mutate_bytes(whole, chance)
    return whole * chance.choice((1,) * 9 + (3,))


class Fuzz:
    def __init__(self, port: int, keys: list[str], mutate: Any, recorded: list[Any], seed: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.found: list[str] = []
        self._port, self._keys, self._mutate, self._recorded = port, keys, mutate, recorded
        self._seeds = itertools.count(seed)

    async def run(self, until: float) -> None:
        await asyncio.gather(*(self._worker(number, until) for number in range(WORKERS)))

    async def _worker(self, number: int, until: float) -> None:
        while time.monotonic() < until:
            seed = next(self._seeds)
            data = request(random.Random(seed), self._mutate, self._recorded, self._keys[number])
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    answer = await self._send(data)
            except TimeoutError:
                self.found.append(f"seed {seed}: no answer within {TIMEOUT_S:g} s")
                continue
            status = answer[9:12].decode("latin-1") or "closed"
            self.statuses[status] += 1
            if b'"code":"gateway"' in answer or b"The gateway failed" in answer:
                self.found.append(f"seed {seed}: a failure of the gateway's own")
            if b'"code":"store_failed"' in answer:
                self.found.append(f"seed {seed}: a call that could not be recorded")

    async def _send(self, data: bytes) -> bytes:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            self.found.append(f"cannot connect: {error}")
            await asyncio.sleep(1)
            return b""
        received = b""
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            # Not half closed: that is how a client leaves. Half a request is one that never ends, so it is left soon.
            while piece := await asyncio.wait_for(reader.read(1 << 16), 0.2 if received else 1.0):
                received += piece
        writer.transport.abort()
        return received


def wrong_rows(store: str) -> list[str]:
    """Rows that no right gateway writes."""
    opened = open_store(store)
    found, seq = [], 0
    while page := opened.calls_after(seq, 500):
        seq = page[-1].seq
        for call in page:
            exact = call.fidelity is Fidelity.EXACT
            if exact and (call.state is not CallState.COMPLETE or not call.choices or call.usage is None):
                found.append(f"call {call.seq} is exact and {call.state}")
            for choice in call.choices if exact else ():
                if len(choice.token_ids) != len(choice.logprobs) or not choice.finish_reason:
                    found.append(f"call {call.seq} is exact and does not add up")
    opened.close()
    return found


def check(minutes: float, seed: int) -> list[Result]:
    sys.path.append(str(TESTS))
    mutate = importlib.import_module("fakes.mutate")
    files = sorted((TESTS / "dialects" / "data").glob("*.jsonl"))
    recorded = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    recorded.append({"path": "/v1/completions", "body": {"model": "policy", "prompt": "Hi"}})
    with sqlite_store() as store:
        return asyncio.run(_check(minutes, seed, store, mutate, recorded))


async def _check(minutes: float, seed: int, store: str, mutate: Any, recorded: list[Any]) -> list[Result]:
    upstream = BrokenUpstream(mutate)
    await upstream.start()
    keys = await asyncio.to_thread(open_sessions, store, WORKERS)
    options = ("--upstream-retries", "0", "--health-fall", "1000000", "--mode", "record", "--idle-timeout-s", "5")
    gateway = GatewayProcess(upstream=f"http://127.0.0.1:{upstream.port}", store=store, options=options)
    await asyncio.to_thread(gateway.__enter__)
    try:
        fuzz = Fuzz(gateway.port, keys, mutate, recorded, seed * 1_000_000)
        link = Link(gateway.port)
        memory = 0
        end = time.monotonic() + minutes * 60
        for part in range(4):  # the first is the warm-up of memory
            upstream.healthy = part == 1
            await fuzz.run(min(end, time.monotonic() + minutes * 60 / 4))
            memory = memory or gateway.rss()
        grown = (gateway.rss() - memory) / 1e6
        upstream.healthy = True
        sane = (await link.post(f"/s/{keys[0]}/v1/chat/completions", chat("sane"))).acknowledged
        alive = gateway.process.poll() is None
        log = gateway.said()
    finally:
        await asyncio.to_thread(gateway.__exit__)
    rows = await asyncio.to_thread(wrong_rows, store)
    made = fuzz.statuses.total()
    return [
        Result(
            check=f"fuzz, {minutes:g} minutes", figure=f"{made} requests, {upstream.calls} went upstream", ok=made > 0
        ),
        Result(check="  statuses", figure=str(dict(fuzz.statuses.most_common())), ok=True),
        Result(check="  failures of the gateway's own", figure=str(len(fuzz.found)), ok=not fuzz.found),
        Result(check="  tracebacks in its log", figure=str(log.count("Traceback")), ok="Traceback" not in log),
        Result(check="  rows that are wrong", figure=str(len(rows)), ok=not rows),
        Result(check="  alive, and answers a whole request", figure=f"{alive}, {sane}", ok=alive and sane),
        Result(
            check="  memory after a quarter and at the end",
            figure=f"{grown:+.1f} MB, {grown / max(made, 1) * 4 / 3 * 1000:+.2f} MB per 1,000",
            ok=grown / max(made, 1) * 1000 < 5,
        ),
        *(Result(check="  found", figure=text, ok=False) for text in [*fuzz.found[:8], *rows[:3]]),
        *(Result(check="  log", figure=line, ok=False) for line in _last_lines(log)),
    ]


def _last_lines(log: str) -> list[str]:
    """What was raised in each traceback, and where; the log may hold them as text in JSON."""
    raised = set()
    for part in log.replace("\\n", "\n").split("Traceback (most recent call last):")[1:]:
        places = [line.strip().rpartition("/")[2] for line in part.splitlines() if line.startswith("  File ")]
        what = [line for line in part.splitlines() if line and not line.startswith(" ")][:1]
        raised.add(f"{re.sub('0x[0-9a-f]+', '0x…', ''.join(what))} ({' < '.join(reversed(places[-6:]))})")
    return sorted(raised)[:8]
