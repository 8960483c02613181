"""Idle time of the trainer under each schedule, where the times of rollouts have a heavy tail.

python bench/schedule.py

The scheduler, the reconciler and the SQLite store are the real ones, on the real clock. Agents only wait: a rollout
takes a time drawn from a Pareto distribution (shape 1.5, so that its variance is infinite; cut at 60 units), the same
one under every schedule. `--concurrency` of them run at a time. Training a step takes `--train` times what a step's
rollouts take on average at that concurrency. On one machine (collocated) rollouts stand still while it trains.

`idle` is the time the trainer waits for groups. `ideal` is a lower bound of it for the same rollouts:

    sync            each step's rollouts, spread over all places, and no shorter than its longest one
    collocated      all rollouts, spread over all places without a gap
    disaggregated   the same, less the time the trainer is busy; at least until the first step's groups can have ended
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import platform
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from outrider.protocols import Exit, Launch
from outrider.reconcile import Reconciler
from outrider.samplers.shuffle import Shuffle
from outrider.schedule import Group, Scheduler
from outrider.stores.sqlite import SqliteStore
from outrider.types import Call, CallState, Episode, Fidelity, Json, Rollout, Task

Mode = Literal["sync", "collocated", "disaggregated"]
MODES: tuple[Mode, ...] = ("sync", "collocated", "disaggregated")
LONGEST = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--ahead", type=int, nargs="+", default=[1, 4], help="max_staleness")
    parser.add_argument("--train", type=float, nargs="+", default=[1.0], help="as a multiple, see above")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of the shortest rollout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    found = [
        Bench(args, train, ahead).run(mode)
        for train in args.train
        for mode in MODES
        for ahead in (args.ahead if mode != "sync" else [0])
    ]
    print(f"{platform.machine()}, Python {platform.python_version()}; {args}")
    print_table(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


class Agents:
    """An executor whose attempts wait. `pause` stops their clocks."""

    def __init__(self, store: SqliteStore, bench: Bench) -> None:
        self._store, self._bench = store, bench
        self._live: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._paused_at: float | None = None
        self._skipped = 0.0
        self.ran_s = 0.0
        self.version = 0
        self.versions: dict[str, int] = {}

    def _now(self) -> float:
        return (self._paused_at or time.monotonic()) - self._skipped

    def start(self, launch: Launch) -> None:
        with self._changed:
            self.versions[launch.attempt_id.rpartition(".")[0]] = self.version
            heapq.heappush(self._live, (self._now() + self._bench.seconds(launch.attempt_id), launch.attempt_id))
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[Exit]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._live or self._live[0][0] > self._now():
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                next_s = self._live[0][0] - self._now() if self._live else left
                self._changed.wait(max(0.0, min(left, next_s)))
            ended = []
            while self._live and self._live[0][0] <= self._now():
                ended.append(heapq.heappop(self._live)[1])
        return [self._end(attempt_id) for attempt_id in ended]

    def _end(self, attempt_id: str) -> Exit:
        self.ran_s += self._bench.seconds(attempt_id)
        self._store.append_call(a_call(attempt_id)).result()
        return Exit(attempt_id=attempt_id, exit_code=0, signal=None)

    @contextlib.contextmanager
    def paused(self, pause: bool) -> Iterator[None]:
        if not pause:
            yield
            return
        self._paused_at = time.monotonic()
        yield
        self._skipped += time.monotonic() - self._paused_at
        self._paused_at = None

    def stop(self, attempt_id: str) -> None:
        with self._changed:
            self._live = [one for one in self._live if one[1] != attempt_id]
            heapq.heapify(self._live)

    def lag(self, rollout_ids: Sequence[str]) -> int:
        """Publishes since the first of these rollouts that has begun."""
        return self.version - min(self.versions.get(name, self.version) for name in rollout_ids)

    def hold_time(self, held: bool) -> None: ...

    def close(self) -> None: ...


class Bench:
    """One workload: how long each rollout takes, and how long training does."""

    def __init__(self, args: argparse.Namespace, train: float, ahead: int) -> None:
        self.args, self.train, self.ahead = args, train, ahead
        mean = statistics.fmean(self.seconds(f"g{g}-{m}.a1") for g in range(1000) for m in range(args.size))
        self.train_s = train * mean * args.groups * args.size / args.concurrency

    def seconds(self, attempt_id: str) -> float:
        """Of a rollout, whenever it is asked for."""
        group, member = attempt_id.partition(".")[0][1:].split("-")
        rng = np.random.default_rng((self.args.seed, int(group), int(member)))
        return float(self.args.unit * min(LONGEST, 1 + rng.pareto(1.5)))

    def plan(self, index: int, task: int) -> list[Rollout]:
        return [
            Rollout(id=f"g{index}-{member}", task=Task(id=str(task), fields={}), group_id=f"g{index}", step=index)
            for member in range(self.args.size)
        ]

    def run(self, mode: Mode) -> Json:
        with tempfile.TemporaryDirectory() as folder:
            store = SqliteStore(Path(folder) / "store.sqlite3", synchronous="NORMAL")
            try:
                return self._run(mode, store, Path(folder))
            finally:
                store.close()

    def _reconciler(self, agents: Agents, store: SqliteStore, folder: Path) -> Reconciler:
        return Reconciler(
            store=store,
            executor=agents,
            reward=reward,
            reward_name="bench",
            env_for_key=lambda key: {},
            workdir=folder / "work",
            observer=Silent(),
            concurrency=self.args.concurrency,
            max_attempts=1,
            reward_timeout_s=60.0,
            stop=threading.Event(),
        )

    def _run(self, mode: Mode, store: SqliteStore, folder: Path) -> Json:
        args, agents = self.args, Agents(store, self)
        sampler = Shuffle([Task(id=str(i), fields={}) for i in range(64)], seed=0, success=1.0)
        scheduler = Scheduler(
            self._reconciler(agents, store, folder),
            self.plan,
            sampler,
            mode=mode,
            per_step=args.groups,
            ahead=self.ahead,
            too_old=lambda ids: "under way" if agents.lag(ids) > self.ahead else "",
        )
        idle, lags, dropped, consumed = list[float](), list[int](), Counter[str](), list[Group]()
        with scheduler:
            began = time.monotonic()
            for _ in range(args.steps):
                waited = time.monotonic()
                fresh: list[Group] = []
                waiting = scheduler.take()
                while waiting:
                    group = waiting.pop(0)
                    lag = agents.lag([rollout.id for rollout in group.rollouts])
                    if lag > self.ahead:
                        waiting.append(scheduler.replace("when taken"))
                    else:
                        fresh.append(group)
                        lags.append(lag)
                consumed += fresh
                dropped += scheduler.dropped
                idle.append(time.monotonic() - waited)
                with agents.paused(mode == "collocated"):
                    time.sleep(self.train_s)
                agents.version += 1
            wall = time.monotonic() - began
        sampling_s = wall - (args.steps * self.train_s if mode == "collocated" else 0.0)
        ideal = self.ideal(mode, consumed)
        return {
            "mode": mode,
            "train": self.train,
            "ahead": self.ahead,
            "train_s": self.train_s,
            "step_s": wall / args.steps,
            "idle_s": sum(idle) / args.steps,
            "ideal_s": ideal / args.steps,
            "idle_share": sum(idle) / wall,
            "places_used": agents.ran_s / (args.concurrency * sampling_s),
            "lag": statistics.fmean(lags),
            "dropped_under_way": dropped["under way"],
            "dropped_when_taken": dropped["when taken"],
        }

    def ideal(self, mode: Mode, consumed: list[Group]) -> float:
        """Least time the trainer can wait for these groups in all, seconds."""
        args = self.args
        times = [[self.seconds(f"{rollout.id}.a1") for rollout in group.rollouts] for group in consumed]
        steps = [
            [seconds for group in times[at : at + args.groups] for seconds in group]
            for at in range(0, len(times), args.groups)
        ]
        spread = sum(map(sum, times)) / args.concurrency
        if mode == "sync":
            return sum(max(sum(step) / args.concurrency, max(step)) for step in steps)
        if mode == "collocated":
            return spread
        first = range((self.ahead + 1) * args.groups)  # any of these can be in the first step
        longest = sorted(max(self.seconds(f"g{g}-{m}.a1") for m in range(args.size)) for g in first)
        return max(longest[args.groups - 1], spread - (args.steps - 1) * self.train_s)


class Silent:
    """An observer that says nothing."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, rollout: Rollout | None = None) -> None: ...

    def record(self, record: Json, *, earlier: bool = False) -> None: ...

    def message(self, text: str) -> None:
        print(text)


def reward(episode: Episode) -> float:
    return float(episode.attempt.rollout_id.endswith("-0"))


def a_call(attempt_id: str) -> Call:
    return Call(
        id=f"{attempt_id}-0",
        attempt_id=attempt_id,
        dialect="openai_chat",
        model="policy",
        state=CallState.COMPLETE,
        status=200,
        streamed=False,
        request=b"{}",
        response=b"{}",
        prompt_ids=None,
        choices=(),
        usage=None,
        fidelity=Fidelity.TEXT,
    )


def print_table(found: list[dict[str, Any]]) -> None:
    print(
        "\nSeconds are means a step. Places: how much of the time in which agents may run they were in use, by rollouts"
    )
    print("that ended. Dropped groups were too old, under way or when they were taken.\n")
    print("| training | schedule | ahead | step, s | trainer idle, s | ideal, s | idle | places | lag | dropped |")
    print("|---" * 10 + "|")
    for one in found:
        dropped = f"{one['dropped_under_way']} + {one['dropped_when_taken']}"
        print(
            f"| {one['train']:g}x ({one['train_s']:.2f} s) | {one['mode']} | {one['ahead']} | {one['step_s']:.3f} |"
            f" {one['idle_s']:.3f} | {one['ideal_s']:.3f} | {one['idle_share']:.0%} |"
            f" {one['places_used']:.0%} | {one['lag']:.2f} | {dropped} |"
        )


if __name__ == "__main__":
    main()
