"""Clients that are slow, large, rude or many: what they cost others, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import zlib
from collections import Counter
from pathlib import Path

import zstandard
from reliability_kill import sqlite_store
from reliability_rig import (
    CHAT,
    Answer,
    GatewayProcess,
    Link,
    Result,
    chat,
    open_sessions,
    percentile,
    running_upstream,
)

SLOW = 500
OTHERS = 16
LIMIT_S = 5.0  # the gateway's time limits in the check of slow clients
MEASURE_S = 10.0


# -- slow loris --------------------------------------------------------------------------------------------------------


async def trickle(port: int, key: str, kind: int) -> float:
    """Send headers, or a body, a byte at a time, or take in no answer; returns when cut off, after how long."""
    began = time.monotonic()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2048)
    body = chat("slow", streamed=True)
    head = f"POST /s/{key}{CHAT} HTTP/1.1\r\nhost: gw\r\n"
    with contextlib.suppress(OSError):
        if kind == 0:
            rest = head.encode()
        elif kind == 1:
            writer.write(f"{head}content-length: 100000\r\n\r\n".encode())
            rest = body
        else:
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            rest = b""
        for at in range(60):
            if rest:
                writer.write(rest[at : at + 1])
            elif kind == 2:
                await reader.read(1)  # a byte a second
            await asyncio.sleep(1)
            if (kind != 2 and reader.at_eof()) or reader.exception() or writer.transport.is_closing():
                break
    writer.transport.abort()
    return time.monotonic() - began


async def latencies(port: int, keys: list[str], seconds: float) -> tuple[list[float], int]:
    """Of plain calls over `OTHERS` connections, and how many calls failed."""
    found: list[float] = []
    failed = 0

    async def agent(number: int) -> None:
        nonlocal failed
        link = Link(port)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            answer = await link.post(f"/s/{keys[number]}{CHAT}", chat(f"other-{number}"))
            failed += not answer.acknowledged
            found.append(time.monotonic() - began)
            await asyncio.sleep(0.01)  # some load, not all there can be: the machine's limit is not what is asked for
        link.close()

    await asyncio.gather(*(agent(number) for number in range(OTHERS)))
    return found, failed


def slow_clients() -> list[Result]:
    with sqlite_store() as store:
        keys = open_sessions(store, OTHERS + 1)
        limits = ("--header-timeout-s", str(LIMIT_S), "--idle-timeout-s", str(LIMIT_S))
        with (
            running_upstream() as upstream,
            GatewayProcess(upstream=upstream.url, store=store, options=limits) as gateway,
        ):

            async def measure() -> tuple[list[float], list[float], int, list[float]]:
                await latencies(gateway.port, keys, 2.0)  # warms up
                before, failed_before = await latencies(gateway.port, keys, MEASURE_S)
                slow = [asyncio.create_task(trickle(gateway.port, keys[-1], n % 3)) for n in range(SLOW)]
                await asyncio.sleep(0.5)
                during, failed = await latencies(gateway.port, keys, MEASURE_S)
                return before, during, failed + failed_before, await asyncio.gather(*slow)

            before, during, failed, held = asyncio.run(measure())
            asyncio.run(asyncio.sleep(1))
            files = gateway.open_files()
    ratio = percentile(during, 0.99) / percentile(before, 0.99)
    p99 = f"{percentile(before, 0.99) * 1e3:.1f} -> {percentile(during, 0.99) * 1e3:.1f} ms"
    cut = ", ".join(f"{max(held[kind::3]):.0f} s" for kind in (0, 1))
    return [
        Result(check=f"{SLOW} slow clients", figure=f"{OTHERS} others, {len(during)} calls", ok=len(during) > 0),
        Result(check="  others' p99", figure=f"x {ratio:.2f} ({p99})", ok=ratio <= 2, wanted="x 2"),
        Result(check="  others' calls that failed", figure=str(failed), ok=not failed),
        Result(
            check=f"  cut off: headers, bodies (limits {LIMIT_S:g} s)",
            figure=cut,
            ok=max(held[0::3] + held[1::3]) < 59,
        ),
        # An answer of this size is in the kernel's buffers at once, and nothing of it in the gateway. Of a larger one,
        # a client that takes in nothing is cut off: tests/gateway/test_reliability_connections.py.
        Result(
            check="  files open afterwards", figure=f"{files}, of {SLOW // 3} slow readers one each", ok=files < SLOW
        ),
    ]


SMALL_CALL = 4 << 20  # what any call may take besides


# -- large bodies ------------------------------------------------------------------------------------------------------


def large_bodies(megabytes: int = 32) -> list[Result]:
    """Peak and rest of the gateway's memory for one large body at a time, over each dialect."""
    size = megabytes << 20
    text = "word " * ((size - 200) // 5)
    talk = [{"role": "user", "content": text}]
    half = text[: len(text) // 2]
    picture = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * (len(half) // 8)}
    blocks = [{"type": "text", "text": half}, {"type": "image", "source": picture}]
    # Python takes four bytes for each character of a text that holds one such.
    emoji = [{"role": "user", "content": text[:-4] + "\N{GRINNING FACE}"}]
    bodies = {
        "chat completions": (CHAT, {"model": "policy", "messages": talk}),
        "completions": ("/v1/completions", {"model": "policy", "prompt": text}),
        "chat, one emoji": (CHAT, {"model": "policy", "messages": emoji}),
        "messages, translated": ("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": talk}),
        "messages, one emoji": ("/v1/messages", {"model": "policy", "max_tokens": 9, "messages": emoji}),
        "messages, a picture": (
            "/v1/messages",
            {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}]},
        ),
        "responses, translated": ("/v1/responses", {"model": "policy", "input": text}),
    }
    found = []
    for mode in ("train", "record"):
        for name, (path, fields) in bodies.items():
            body = json.dumps(fields, ensure_ascii=False).encode()
            found.append(large_body(f"{megabytes} MB body, {mode}, {name}", mode, path, body))
    return found


def large_body(label: str, mode: str, path: str, body: bytes) -> Result:
    with sqlite_store() as store:
        (key,) = open_sessions(store, 1)
        prefix = f"/s/{key}" if mode == "train" else ""
        options = ("--mode", mode)
        with (
            running_upstream() as upstream,
            GatewayProcess(upstream=upstream.url, store=store, options=options) as gateway,
        ):

            async def call(sent: bytes) -> Answer:
                link = Link(gateway.port)
                answer = await link.post(prefix + path, sent)
                link.close()
                return answer

            asyncio.run(call(body.replace(b"word ", b"")))  # loads what is loaded with the first call
            before = gateway.rss()
            Path(f"/proc/{gateway.process.pid}/clear_refs").write_text("5")  # the peak counts from here
            answer = asyncio.run(call(body))
            peak = gateway.peak_rss() - before
            time.sleep(0.5)
            rest = gateway.rss() - before
    times = peak / len(body)
    return Result(
        check=label,
        figure=f"{answer.status}, peak + {peak / 1e6:.0f} MB (x {times:.1f}), afterwards + {rest / 1e6:.0f} MB",
        ok=answer.status == 200 and peak <= 3 * len(body) + SMALL_CALL and rest < len(body) / 2,
        wanted="x 3",
    )


def bombs() -> list[Result]:
    """Bodies that unpack to 2 GiB."""
    zeros = b"0" * (1 << 20)
    packer = zlib.compressobj(9, wbits=31)
    gzipped = b"".join([b"".join(packer.compress(zeros) for _ in range(2048)), packer.flush()])
    zstd = zstandard.ZstdCompressor(level=3).compressobj()
    packed = b"".join([b"".join(zstd.compress(zeros) for _ in range(2048)), zstd.flush()])
    found = []
    with sqlite_store() as store:
        (key,) = open_sessions(store, 1)
        with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
            for name, body in (("gzip", gzipped), ("zstd", packed)):

                async def call(name: str = name, body: bytes = body) -> Answer:
                    link = Link(gateway.port)
                    answer = await link.post(f"/s/{key}{CHAT}", body, f"content-encoding: {name}\r\n")
                    link.close()
                    return answer

                before = gateway.rss()
                Path(f"/proc/{gateway.process.pid}/clear_refs").write_text("5")
                status = asyncio.run(call()).status
                peak = gateway.peak_rss() - before
                found.append(
                    Result(
                        check=f"{name} bomb, {len(body) >> 10} KiB to 2 GiB",
                        figure=f"{status}, peak + {peak / 1e6:.0f} MB",
                        ok=status == 413 and peak < 300e6,
                    )
                )
    return found


# -- what faults leave behind ------------------------------------------------------------------------------------------

WARM_UP = 1000
MB_PER_1000 = 5.0


async def _leave(port: int, path: str, body: bytes) -> None:
    """Call and go away before the answer ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: gw\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.read(1)
    writer.transport.abort()


def leaks(calls: int) -> list[Result]:
    """Memory and open files after many calls that end badly, each kind in a gateway of its own."""
    found = []
    for name in ("answered", "cut", "cut stream", "left", "left stream", "bad JSON", "bad key", "one attempt each"):
        found.append(leak(name, calls))
    return found


def leak(name: str, calls: int) -> Result:
    streamed = "stream" in name
    fault = {"cut": "cut", "left": "hang"}.get(name.split(" ")[0])
    fields = {"x_fault": fault} if fault else {}
    with sqlite_store() as store:
        keys = open_sessions(store, calls + WARM_UP if name == "one attempt each" else 16)
        with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
            seen: Counter[str] = Counter()

            async def agent(numbers: range) -> None:
                link = Link(gateway.port)
                for number in numbers:
                    key = "ork-none" if name == "bad key" else keys[number % len(keys)]
                    path = f"/s/{key}{CHAT}"
                    body = b'{"messages": [' if name == "bad JSON" else chat(str(number), streamed=streamed, **fields)
                    if fault == "hang":
                        await _leave(gateway.port, path, body)
                    else:
                        seen[str((await link.post(path, body)).status)] += 1
                link.close()

            async def run(numbers: range) -> None:
                await asyncio.gather(*(agent(numbers[start::16]) for start in range(16)))

            asyncio.run(run(range(WARM_UP)))
            time.sleep(0.5)
            memory, files = gateway.rss(), gateway.open_files()
            asyncio.run(run(range(WARM_UP, WARM_UP + calls)))
            time.sleep(0.5)
            grown = (gateway.rss() - memory) / 1e6 / calls * 1000
            more = gateway.open_files() - files
    return Result(
        check=f"memory, {name}",
        figure=f"{grown:+.2f} MB per 1,000 calls, {more:+d} files ({dict(seen) or 'left'})",
        ok=grown < MB_PER_1000 and more < 20,
        wanted=f"{MB_PER_1000:g} MB",
    )
