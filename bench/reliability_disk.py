"""A disk that is full, one that fails, and a writer that is held up: told, survived, nothing lost."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
from reliability_kill import read_all, sqlite_store
from reliability_rig import (
    ADMIN_KEY,
    CHAT,
    Answer,
    GatewayProcess,
    Link,
    Result,
    chat,
    open_sessions,
    running_postgres,
    running_upstream,
)

TMPFS_MIB = 4
SOON_S = 1.0


class Trouble:
    """Calls one after another, half of them streamed, and what became of them."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self.acknowledged: set[str] = set()
        self.statuses: dict[str, int] = {}
        self.slowest_refusal_s = 0.0
        self.unshaped = 0
        """Refusals that are not the protocol's own error."""
        self._gateway = gateway
        self._path = f"/s/{key}{CHAT}"
        self._made = 0

    def calls(self, count: int, *, until: Callable[[bool], bool] = lambda acknowledged: False) -> None:
        """Stops early when `until`, given whether the last call was acknowledged, says so."""
        asyncio.run(self._calls(count, until))

    async def _calls(self, count: int, until: Callable[[bool], bool]) -> None:
        link = Link(self._gateway.port)
        for _ in range(count):
            self._made += 1
            name, streamed = f"call-{self._made}", self._made % 2 == 1
            began = time.monotonic()
            answer = await link.post(self._path, chat(name, streamed=streamed, pad=os.urandom(4000).hex()))
            if answer.acknowledged:
                self.acknowledged.add(name)
            else:
                self._refused(answer, time.monotonic() - began)
            if until(answer.acknowledged):
                break
        link.close()

    def _refused(self, answer: Answer, took_s: float) -> None:
        self.slowest_refusal_s = max(self.slowest_refusal_s, took_s)
        kind = f"{answer.status}{' stream' if answer.headers.get('content-type', '').startswith('text/event') else ''}"
        self.statuses[kind] = self.statuses.get(kind, 0) + 1
        last = answer.body.strip().split(b"\n\n")[-1].removeprefix(b"data: ")
        try:
            shaped = answer.whole and "message" in json.loads(last)["error"]
        except (ValueError, KeyError):
            shaped = False
        self.unshaped += not shaped or (answer.status == 503 and "retry-after" not in answer.headers)


def trouble_check(
    label: str,
    store: str,
    *,
    begin: Callable[[GatewayProcess], None],
    end: Callable[[GatewayProcess], None],
    fills_up: bool = False,
) -> list[Result]:
    """`begin` brings the trouble on and `end` takes it away; with `fills_up` the calls themselves bring it on."""
    (key,) = open_sessions(store, 1)
    with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
        trouble = Trouble(gateway, key)
        trouble.calls(10)
        begin(gateway)
        if fills_up:
            trouble.calls(5000, until=lambda acknowledged: not acknowledged)
        trouble.calls(20)
        refused = sum(trouble.statuses.values())
        readable = read_routes(gateway)
        end(gateway)
        before = len(trouble.acknowledged)
        began = time.monotonic()
        trouble.calls(100, until=lambda acknowledged: acknowledged)
        recovered_s = time.monotonic() - began
        trouble.calls(10)
        recovered = len(trouble.acknowledged) - before
    rows, problems = read_all(store)
    lost = [name for name in trouble.acknowledged if not rows[name]]
    return [
        Result(check=label, figure=f"{refused} calls refused: {trouble.statuses}", ok=refused > 0),
        Result(check="  answered calls lost", figure=f"{len(lost)} of {len(trouble.acknowledged)}", ok=not lost),
        Result(check="  half or wrong rows", figure=f"{len(problems)} of {rows.total()}", ok=not problems),
        Result(
            check="  slowest refusal",
            figure=f"{trouble.slowest_refusal_s:.2f} s",
            ok=trouble.slowest_refusal_s < SOON_S,
            wanted=f"{SOON_S:g} s",
        ),
        Result(check="  refusals not in the protocol's shape", figure=str(trouble.unshaped), ok=not trouble.unshaped),
        Result(check="  reads meanwhile", figure=readable, ok=readable == "200 200 200"),
        Result(
            check="  served again without a restart",
            figure=f"{recovered} calls, the first after {recovered_s:.2f} s",
            ok=recovered > 0,
        ),
    ]


def read_routes(gateway: GatewayProcess) -> str:
    """Statuses of what only reads."""
    statuses = []
    for path in ("/admin/attempts/attempt-0/calls", "/admin/stats", "/health"):
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=10)
        connection.request("GET", path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        answer = connection.getresponse()
        answer.read()
        statuses.append(str(answer.status))
        connection.close()
    return " ".join(statuses)


def full_disk() -> list[Result]:
    """On a small tmpfs, which needs root; else where there is no file system to fill, this line says so."""
    with tempfile.TemporaryDirectory(prefix="reliability") as folder:
        ballast = Path(folder) / "ballast"
        try:
            command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "tmpfs", folder]
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return [Result(check="disk full", figure="not measured: mounting a tmpfs needs root", ok=False)]
        try:
            ballast.write_bytes(b"x" * (1 << 20))
            return trouble_check(
                f"disk full ({TMPFS_MIB} MiB tmpfs)",
                f"sqlite:///{folder}/store.sqlite3",
                begin=lambda gateway: None,
                end=lambda gateway: ballast.unlink(),
                fills_up=True,
            )
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def failing_disk() -> list[Result]:
    """A limit on the size of files, set and lifted while the gateway runs: a write beyond it fails with EFBIG, which
    SQLite reports as ``disk I/O error``."""

    def limit(gateway: GatewayProcess, size: int) -> None:
        gateway.process.rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with sqlite_store() as store:
        return trouble_check(
            "I/O error (RLIMIT_FSIZE)",
            store,
            begin=lambda gateway: limit(gateway, 4096),
            end=lambda gateway: limit(gateway, resource.RLIM_INFINITY),
        )


def failing_server(url: str) -> list[Result]:
    """PostgreSQL's own answers to a full and to a failing disk, raised by a trigger."""
    found = []
    for label, code in (("disk full", "53100"), ("I/O error", "58030")):
        admin = psycopg.connect(url, autocommit=True)

        def begin(gateway: GatewayProcess, admin: psycopg.Connection = admin, code: str = code) -> None:
            raising = f"BEGIN RAISE EXCEPTION USING ERRCODE = '{code}', MESSAGE = 'trouble'; END"
            function = f"FUNCTION outrider.trouble() RETURNS trigger LANGUAGE plpgsql AS $${raising}$$"
            admin.execute(f"CREATE OR REPLACE {function}".encode())
            admin.execute("CREATE TRIGGER trouble BEFORE INSERT ON outrider.calls EXECUTE FUNCTION outrider.trouble()")

        def end(gateway: GatewayProcess, admin: psycopg.Connection = admin) -> None:
            admin.execute("DROP TRIGGER trouble ON outrider.calls")

        found += trouble_check(f"PostgreSQL, {label} (SQLSTATE {code})", url, begin=begin, end=end)
        admin.execute("DROP SCHEMA outrider CASCADE")
        admin.close()
    return found


# -- a writer that is held up ------------------------------------------------------------------------------------------

AGENTS = 96
BODY_BYTES = 4 << 20


@contextlib.contextmanager
def sqlite_held(store: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextlib.contextmanager
def postgres_held(store: str) -> Iterator[None]:
    with psycopg.connect(store) as other:
        other.execute("LOCK TABLE outrider.calls IN ACCESS EXCLUSIVE MODE")
        yield
        other.rollback()


def stalled_check(
    label: str, store: str, held: Callable[[str], contextlib.AbstractContextManager[None]], stall_s: float
) -> list[Result]:
    """`AGENTS` agents with `BODY_BYTES` each, more than the queue takes, while another process holds the lock."""
    keys = open_sessions(store, AGENTS)
    with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
        acknowledged: dict[str, float] = {}
        refused: dict[str, int] = {}

        async def agent(number: int) -> None:
            """One call, made again as long as it is refused, as an SDK with patience does."""
            name = f"call-{number}"
            body = chat(name, streamed=number % 2 == 1, pad=os.urandom(BODY_BYTES // 2).hex())
            link = Link(gateway.port)
            while name not in acknowledged:
                answer = await link.post(f"/s/{keys[number]}{CHAT}", body)
                if answer.acknowledged:
                    acknowledged[name] = time.monotonic()
                else:
                    told = answer.headers.get("retry-after", "in the stream" if answer.status == 200 else "not told")
                    refused[f"{answer.status}, retry {told}"] = refused.get(f"{answer.status}, retry {told}", 0) + 1
                    await asyncio.sleep(2)
            link.close()

        async def stall() -> float:
            with held(store):
                agents = [asyncio.create_task(agent(number)) for number in range(AGENTS)]
                await asyncio.sleep(stall_s)
            ended = time.monotonic()
            await asyncio.gather(*agents)
            return ended

        ended = asyncio.run(stall())
        peak = gateway.peak_rss()
    rows, problems = read_all(store)
    lost = [name for name in acknowledged if not rows[name]]
    early = sum(at < ended for at in acknowledged.values())
    told = not any("not told" in kind for kind in refused)
    return [
        Result(check=f"writer held up {stall_s:g} s, {label}", figure=f"refused meanwhile: {refused}", ok=told),
        Result(check="  acknowledged before the lock was free", figure=str(early), ok=not early),
        Result(
            check="  calls that came through", figure=f"{len(acknowledged)} of {AGENTS}", ok=len(acknowledged) == AGENTS
        ),
        Result(check="  answered calls lost", figure=f"{len(lost)} of {len(acknowledged)}", ok=not lost),
        Result(check="  half or wrong rows", figure=f"{len(problems)} of {rows.total()}", ok=not problems),
        Result(
            check="  last answer after the lock was free",
            figure=f"{max(acknowledged.values()) - ended:.1f} s, peak memory {peak >> 20} MiB",
            ok=True,
        ),
    ]


def check() -> list[Result]:
    found = full_disk() + failing_disk()
    with running_postgres() as url:
        found += failing_server(url)
    return found


def check_stalled(stall_s: float) -> list[Result]:
    with sqlite_store() as store:
        found = stalled_check("SQLite", store, sqlite_held, stall_s)
    with running_postgres() as url:
        found += stalled_check("PostgreSQL", url, postgres_held, stall_s)
    return found
