"""Kill -9 under load: what was answered is on disk, whole, and the next process is ready soon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from reliability_rig import CHAT, GatewayProcess, Link, Result, chat, open_sessions, running_postgres, running_upstream

from outrider import trajectory
from outrider.stores import open_store
from outrider.types import Call, CallState, Choice, Fidelity, Usage

CONNECTIONS = 64
READY_S = 5.0


class Load:
    """64 agents, every other one streaming, that call until their connection breaks."""

    def __init__(self, keys: list[str]) -> None:
        self.acknowledged: set[str] = set()
        self.astray: list[str] = []
        """Calls that got another call's answer."""
        self.refused: Counter[int] = Counter()
        self._keys = keys
        self._numbers = itertools.count()

    async def run(self, gateway: GatewayProcess, kill_after_s: float) -> None:
        before = len(self.acknowledged)
        tasks = [asyncio.create_task(self._agent(gateway.port, number)) for number in range(CONNECTIONS)]
        while len(self.acknowledged) == before:
            if all(task.done() for task in tasks):
                raise RuntimeError(f"the gateway answered nobody; refused: {dict(self.refused)}")
            await asyncio.sleep(0.01)
        await asyncio.sleep(kill_after_s)
        gateway.kill()
        await asyncio.gather(*tasks)

    async def _agent(self, port: int, number: int) -> None:
        link = Link(port)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                name = f"call-{next(self._numbers)}"
                body = chat(name, streamed=number % 2 == 1)
                answer = await link.post(f"/s/{self._keys[number]}{CHAT}", body)
                if answer.acknowledged:
                    self.acknowledged.add(name)
                    if f'"for-{name}"'.encode() not in answer.body:
                        self.astray.append(name)
                elif answer.status != 200:
                    self.refused[answer.status] += 1
                elif not answer.whole:
                    return
        link.close()


def kill_check(label: str, store: str, *, kills: int, seed: int) -> list[Result]:
    """Kill the gateway `kills` times at random moments of its work and compare."""
    chance = random.Random(seed)
    keys = open_sessions(store, CONNECTIONS)
    load = Load(keys)
    ready: list[float] = []
    with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
        for number in range(kills):
            if number:
                gateway.start()
                ready.append(gateway.ready_s)
            asyncio.run(load.run(gateway, chance.uniform(0.0, 1.0)))
    rows, problems = read_all(store)
    lost = [name for name in load.acknowledged if rows[name] == 0]
    twice = [name for name, count in rows.items() if count > 1]
    answered = len(load.acknowledged)
    return [
        Result(check=f"kill -9, {label}", figure=f"{kills} kills at {CONNECTIONS} connections", ok=True),
        Result(check="  answered calls lost", figure=f"{len(lost)} of {answered}", ok=not lost and answered > 0),
        Result(check="  half or wrong rows", figure=f"{len(problems)} of {rows.total()}", ok=not problems),
        Result(check="  rows written twice", figure=str(len(twice)), ok=not twice),
        Result(check="  answers that went astray", figure=str(len(load.astray)), ok=not load.astray),
        Result(check="  calls refused", figure=str(dict(load.refused)), ok=not load.refused),
        Result(
            check="  ready again, slowest",
            figure=f"{max(ready, default=0):.2f} s",
            ok=max(ready, default=0) < READY_S,
            wanted=f"{READY_S:g} s",
        ),
    ] + [Result(check="  problem", figure=problem, ok=False) for problem in problems[:3]]


def read_all(store: str) -> tuple[Counter[str], list[str]]:
    """Rows by the caller's name of the call, and what is wrong with them: each has to decode and to hold together."""
    opened = open_store(store)
    rows: Counter[str] = Counter()
    problems: list[str] = []
    by_attempt: dict[str, list[Call]] = {}
    seq = 0
    while page := opened.calls_after(seq, 500):
        seq = page[-1].seq
        for call in page:
            rows[json.loads(call.request)["user"]] += 1
            by_attempt.setdefault(call.attempt_id, []).append(call)
            problems += problems_of(call)
    for attempt_id, calls in by_attempt.items():
        try:
            trajectory.build(calls)
        except Exception as error:
            problems.append(f"{attempt_id}: {error}")
    opened.close()
    return rows, problems


def problems_of(call: Call) -> list[str]:
    if call.state is CallState.COMPLETE:
        choice = call.choices[0] if call.choices else None
        if call.fidelity is not Fidelity.EXACT or choice is None or call.usage is None or not call.response:
            return [f"call {call.seq} is complete and {call.fidelity}: {call.fidelity_reason}"]
        if not len(choice.token_ids) == len(choice.logprobs) == call.usage.completion_tokens:
            return [f"call {call.seq}: the lengths differ"]
        return []
    if call.state in (CallState.CANCELLED, CallState.INTERRUPTED) and call.fidelity is not Fidelity.EXACT:
        return []
    return [f"call {call.seq} is {call.state} and {call.fidelity}: {call.error}"]


def fill(store: str, gigabytes: float) -> int:
    """Write made-up calls until the store is this large; returns their number."""
    opened = open_store(store, synchronous="NORMAL")
    noise = np.random.default_rng(0)
    ids = np.arange(200, dtype=np.int32)
    choice = Choice(index=0, token_ids=ids, logprobs=-noise.random(200).astype(np.float32), finish_reason="stop")
    body = 40_000  # bytes that zstd makes no smaller
    count = int(gigabytes * (1 << 30) / (body + 4096))
    for start in range(0, count, 500):
        waiting = [
            opened.append_call(
                Call(
                    id=f"made-up-{number}",
                    attempt_id=f"old-{number // 20}",
                    dialect="openai_chat",
                    model="policy",
                    state=CallState.COMPLETE,
                    status=200,
                    streamed=False,
                    request=json.dumps({"user": f"old-{number}"}).encode(),
                    response=noise.bytes(body),
                    prompt_ids=ids,
                    choices=(choice,),
                    usage=Usage(prompt_tokens=200, completion_tokens=200),
                    fidelity=Fidelity.EXACT,
                )
            )
            for number in range(start, min(start + 500, count))
        ]
        for future in waiting:
            future.result()
    opened.close()
    return count


def large_store_check(gigabytes: float) -> list[Result]:
    """How soon a gateway is ready over a large store after a kill under load, so with a WAL to be recovered."""
    with tempfile.TemporaryDirectory(prefix="reliability") as folder:
        path = Path(folder) / "store.sqlite3"
        store = f"sqlite:///{path}"
        count = fill(store, gigabytes)
        load = Load(open_sessions(store, CONNECTIONS))
        ready = []
        with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
            for _ in range(3):
                asyncio.run(load.run(gateway, 2.0))
                wal = path.with_name(path.name + "-wal").stat().st_size
                gateway.start()
                ready.append(gateway.ready_s)
            began = time.monotonic()
            asyncio.run(load.run(gateway, 0.0))
            first = time.monotonic() - began
        size = path.stat().st_size
    return [
        Result(
            check="large store", figure=f"{size / (1 << 30):.2f} GiB, {count} old calls, WAL {wal >> 20} MiB", ok=True
        ),
        Result(
            check="  ready after kill -9, slowest of 3",
            figure=f"{max(ready):.2f} s",
            ok=max(ready) < READY_S,
            wanted=f"{READY_S:g} s",
        ),
        Result(check="  first answer after that", figure=f"{first:.2f} s", ok=first < READY_S),
    ]


@contextlib.contextmanager
def sqlite_store() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="reliability") as folder:
        yield f"sqlite:///{folder}/store.sqlite3"


def check(kills: int, gigabytes: float, seed: int) -> list[Result]:
    with sqlite_store() as store:
        found = kill_check("SQLite", store, kills=kills, seed=seed)
    with running_postgres() as url:
        found += kill_check("PostgreSQL", url, kills=kills, seed=seed)
    return found + large_store_check(gigabytes)


# -- a restart in the middle of everything -----------------------------------------------------------------------------

TURNS = 6


def restart_check(label: str, *, signal_name: str) -> list[Result]:
    """64 agents on the OpenAI SDK as it comes, two retries within some 1.5 s, while the gateway dies and is started
    again, as soon as its supervisor would."""
    with sqlite_store() as store:
        keys = open_sessions(store, CONNECTIONS)
        with running_upstream() as upstream, GatewayProcess(upstream=upstream.url, store=store) as gateway:
            outcomes, away_s = asyncio.run(_restart(gateway, keys, signal_name))
        rows, problems = read_all(store)
    through = sum(outcome == "" for outcome in outcomes)
    answered = [f"agent-{number}-{turn}" for number in range(CONNECTIONS) for turn in range(TURNS)]
    lost = [name for name in answered if not rows[name] and not outcomes[int(name.split("-")[1])]]
    return [
        Result(check=f"restart, {label}", figure=f"{CONNECTIONS} attempts in flight, away for {away_s:.2f} s", ok=True),
        Result(check="  attempts that went on to their end", figure=f"{through}", ok=through == CONNECTIONS),
        Result(check="  answered calls lost", figure=str(len(lost)), ok=not lost),
        Result(check="  half or wrong rows", figure=f"{len(problems)} of {rows.total()}", ok=not problems),
        *(Result(check="  stopped by", figure=text, ok=False) for text in sorted(set(filter(None, outcomes)))[:3]),
    ]


async def _restart(gateway: GatewayProcess, keys: list[str], signal_name: str) -> tuple[list[str], float]:
    """Why each agent stopped, empty for none; and how long there was no gateway."""
    import openai

    async def agent(number: int) -> str:
        base_url = f"http://127.0.0.1:{gateway.port}/s/{keys[number]}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="any") as client:
            history: list[dict[str, str]] = []
            for turn in range(TURNS):
                name = f"agent-{number}-{turn}"
                history.append({"role": "user", "content": name})
                try:
                    reply = await client.chat.completions.create(
                        model="policy",
                        messages=history,  # type: ignore[arg-type]
                        user=name,
                        extra_body={"x_fault": "slow"},
                    )
                except openai.OpenAIError as error:
                    return f"{type(error).__name__}: {error}"
                history.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                await asyncio.sleep(0.1)
        return ""

    agents = [asyncio.create_task(agent(number)) for number in range(CONNECTIONS)]
    await asyncio.sleep(0.6)
    began = time.monotonic()
    gateway.process.send_signal(getattr(signal, signal_name))
    await asyncio.to_thread(gateway.process.wait)
    await asyncio.to_thread(gateway.start)
    away_s = time.monotonic() - began
    return list(await asyncio.gather(*agents)), away_s


def check_restart() -> list[Result]:
    return restart_check("kill -9", signal_name="SIGKILL") + restart_check("SIGTERM", signal_name="SIGTERM")
