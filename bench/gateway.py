"""What it costs to record calls before they are answered, beside a peer that records and proxies that don't.

    python bench/gateway.py --agl-python /path/to/venv/bin/python --nginx /usr/sbin/nginx --json out.json

All of them run at once against one fixed upstream (62 KB answers with ids and log-probs) and are called in turn, in
rounds, in reverse order every other round; ratios are taken inside a round. CPU-seconds are those of a whole process
tree. The peer is agentlightning 1.0.2, which keeps calls in memory and takes no streams: `pip install
agentlightning==1.0.2` into an environment of its own. Without --agl-python or --nginx they are left out.

Load, upstream and gateway share the machine, so a rate is a ratio at best; trust CPU-seconds first. The store's files
lie under --folder, which should be on the disk that is meant: on a file system in memory nothing is ever synced.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gateway_targets as targets
from gateway_load import request_body, text_hash
from gateway_targets import Target
from gateway_upstream import answers

from outrider.types import Mode

HERE = Path(__file__).resolve().parent
SYNC_BYTES = 32 << 10  # about what the commit of one call writes
PACED_GAP_MS = 10.0

Json = dict[str, Any]


def load(target: Target, connections: int, seconds: float, *, stream: bool = False, fresh: bool = False) -> Json:
    """Call `target` for a while; what the callers saw, and what it cost."""
    command = [sys.executable, str(HERE / "gateway_load.py"), target.url]
    command += ["--connections", str(connections), "--seconds", str(seconds)]
    command += ["--stream"] * stream + ["--fresh"] * fresh
    if stream and target.store is not None:
        command += ["--store", str(target.store)]
    for header in target.headers:
        command += ["--header", header]
    before = target.cpu_s()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the load on {target.name} failed:\n{done.stderr[-2000:]}")
    found: Json = json.loads(done.stdout)
    time.sleep(0.1)
    found["cpu_s"] = 1000 * (target.cpu_s() - before) / max(found["calls"], 1)
    return found | {"name": target.name, "connections": connections}


def sync_ms(folder: Path) -> float:
    """Median time of an fdatasync, in the store's folder."""
    times = []
    with (folder / "sync").open("wb") as file:
        for _ in range(40):
            file.write(os.urandom(SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


class Rounds:
    """Rows of interleaved rounds, and medians over them."""

    def __init__(self) -> None:
        self.rows: list[Json] = []

    def run(self, rounds: int, chosen: Sequence[Target], connections: Sequence[int], call: Callable[..., Json]) -> None:
        for number in range(rounds):
            for count in connections:
                for target in chosen if number % 2 == 0 else reversed(chosen):
                    self.rows.append(call(target, count) | {"round": number})

    def median(self, name: str, connections: int, field: str) -> float:
        return float(statistics.median(row[field] for row in self._of(name, connections)))

    def compare(
        self, name: str, other: str, connections: int, field: str, how: Callable[[float, float], float]
    ) -> float | None:
        """Median over rounds of `how(own, other's)`; None where the other isn't measured."""
        pairs = zip(self._of(name, connections), self._of(other, connections), strict=False)
        found = [how(own[field], others[field]) for own, others in pairs]
        return statistics.median(found) if found else None

    def _of(self, name: str, connections: int) -> list[Json]:
        return [row for row in self.rows if row["name"] == name and row["connections"] == connections]


def ratio(own: float, other: float) -> float:
    return own / other if other else float("nan")


def difference(own: float, other: float) -> float:
    return own - other


class Report:
    """Lines of `figure, measured, bound`."""

    def __init__(self) -> None:
        self.figures: list[Json] = []

    def line(self, figure: str, value: float | None, bound: float | None, unit: str, *, at_least: bool = False) -> None:
        if value is None:
            return
        met = None if bound is None else (value >= bound if at_least else value <= bound)
        self.figures.append({"figure": figure, "value": value, "bound": bound, "unit": unit, "met": met})
        sign = "≥" if at_least else "≤"
        wanted = "" if bound is None else f"   {sign} {bound:g}  {'met' if met else 'NOT met'}"
        print(f"  {figure:66}{value:10.3f} {unit:8}{wanted}", flush=True)


def plain(report: Report, chosen: Sequence[Target], rounds: int, seconds: float, fresh: bool) -> list[Json]:
    print("\nPlain calls, many connections" + ", each message for the first time" * fresh, flush=True)
    measured = Rounds()
    measured.run(rounds, chosen, (16, 64), lambda target, count: load(target, count, seconds, fresh=fresh))
    print(
        f"  {'':14}" + "".join(f"{title:>12}" for title in ("connections", "calls/s", "p50 ms", "CPU-s/1000", "errors"))
    )
    for count in (16, 64):
        for target in chosen:
            values = [measured.median(target.name, count, field) for field in ("per_s", "p50_ms", "cpu_s", "errors")]
            print(f"  {target.name:14}{count:12}{values[0]:12.0f}{values[1]:12.1f}{values[2]:12.3f}{values[3]:12.0f}")
    for count, faster in ((16, 5.0), (64, 8.0)):
        for name in ("train", "record"):
            where = f"{name}, {count} connections"
            report.line(f"{where}: CPU-seconds a 1,000 calls", measured.median(name, count, "cpu_s"), 0.8, "s")
            report.line(
                f"{where}: CPU, of agentlightning's", measured.compare(name, "agl", count, "cpu_s", ratio), 0.1, "×"
            )
            rate = measured.compare(name, "agl", count, "per_s", ratio)
            report.line(f"{where}: calls/s, of agentlightning's", rate, faster, "×", at_least=True)
    return measured.rows


def latency(report: Report, chosen: Sequence[Target], rounds: int, seconds: float, folder: Path) -> list[Json]:
    print("\nPlain calls, one connection", flush=True)
    measured = Rounds()
    syncs = []
    for number in range(rounds):
        before = sync_ms(folder)
        one = Rounds()
        one.run(
            1, chosen if number % 2 == 0 else list(reversed(chosen)), (1,), lambda t, count: load(t, count, seconds)
        )
        syncs.append((before + sync_ms(folder)) / 2)
        measured.rows += [row | {"round": number, "sync_ms": syncs[-1]} for row in one.rows]
    report.line("fdatasync", statistics.median(syncs), None, "ms")
    for name in ("train", "train-normal", "record"):
        added = measured.compare(name, "direct", 1, "p50_ms", difference)
        report.line(f"{name}: added median latency", added, 2.0 if name == "train-normal" else None, "ms")
        if name != "train-normal":
            rows = [row for row in measured.rows if row["name"] in (name, "direct")]
            beyond = [_added(rows, name, number) - sync for number, sync in enumerate(syncs)]
            report.line(f"{name}: added beyond the same round's fdatasync", statistics.median(beyond), 1.0, "ms")
    return measured.rows


def _added(rows: Sequence[Json], name: str, number: int) -> float:
    found = {row["name"]: row["p50_ms"] for row in rows if row["round"] == number}
    return float(found[name] - found["direct"])


def streams(report: Report, chosen: Sequence[Target], rounds: int, seconds: float) -> list[Json]:
    print("\nStreams of 200 chunks", flush=True)
    measured = Rounds()
    measured.run(rounds, chosen, (1, 16), lambda target, count: load(target, count, seconds, stream=True))
    _, events = answers()
    expected = text_hash(events[:-1])
    for name in ("train", "record"):
        added = measured.compare(name, "direct", 1, "first_ms", difference)
        report.line(f"{name}: added time to first token, one connection", added, 2.0, "ms")
        cost = measured.median(name, 16, "cpu_s")
        report.line(f"{name}: CPU-seconds a 1,000 streams, 16 connections", cost, 7.0, "s")
        rows = [row for row in measured.rows if row["name"] == name]
        count = sum(row["calls"] for row in rows)
        odd = sum(row["events"] != [len(events)] or row["texts"] != [expected] for row in rows)
        report.line(f"{name}: runs with an event lost, merged or changed ({count} streams)", odd, 0, "")
        early = sum(row["early"] + row["undone"] + row["errors"] for row in rows)
        report.line(f"{name}: streams without [DONE], or with it before the commit", early, 0, "")
    return measured.rows


def paced(report: Report, folder: Path, seconds: float) -> None:
    """With a pause between chunks each arrives by itself, unless the machine was too busy to look in time."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(targets.upstream(gap_ms=PACED_GAP_MS))
        gateway = stack.enter_context(targets.outrider("paced", Mode.TRAIN, _base(source), folder))
        found = load(gateway, 4, seconds, stream=True)
    _, events = answers()
    odd = max(abs(count - len(events)) for count in found["chunks"])
    where = f"paced by {PACED_GAP_MS:g} ms: HTTP chunks joined or cut, at most in one of {found['calls']}"
    report.line(where, odd, 0, "")


def growth(report: Report, base: str, folder: Path, calls: int) -> list[Json]:
    """Memory and disk over a long run of one gateway."""
    print("\nMemory and disk", flush=True)
    samples: list[Json] = []
    with targets.outrider("growth", Mode.TRAIN, base, folder) as gateway:
        load(gateway, 16, 1.0)
        done = 0
        samples.append({"calls": 0, "rss_mb": gateway.rss_mb()})
        while done < calls:
            done += load(gateway, 16, 2.0)["calls"]
            samples.append({"calls": done, "rss_mb": gateway.rss_mb()})
        store = gateway.store
    whole, _ = answers()
    assert store is not None
    with contextlib.closing(sqlite3.connect(store)) as opened:
        stored = opened.execute("SELECT count(*) FROM calls").fetchone()[0]
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    early = [sample for sample in samples if sample["calls"] <= 20_000]
    late = [sample for sample in samples if sample["calls"] >= 20_000] or samples[-1:]
    first = (early[-1]["rss_mb"] - early[0]["rss_mb"]) / max(early[-1]["calls"], 1) * 1000
    report.line(f"memory a 1,000 calls, the first {early[-1]['calls']}", first, 5.0, "MB")
    spread = late[-1]["calls"] - late[0]["calls"]
    if spread:
        later = (late[-1]["rss_mb"] - late[0]["rss_mb"]) / spread * 1000
        report.line(f"memory a 1,000 calls, from {late[0]['calls']} to {late[-1]['calls']}", later, 0.5, "MB")
    report.line("memory at the end", samples[-1]["rss_mb"], None, "MB")
    raw = stored * (len(whole) + len(request_body(stream=False)))
    report.line(f"disk, of the raw JSON of {stored} calls", store.stat().st_size / raw, 0.4, "×")
    return samples


def _base(source: Target) -> str:
    return source.url.removesuffix(targets.CHAT)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--fresh", action="store_true", help="plain calls: no message of a request was sent before")
    parser.add_argument("--growth-calls", type=int, default=25_000, help="length of the run that shows memory")
    parser.add_argument("--only", nargs="+", choices=("plain", "latency", "streams", "growth"))
    parser.add_argument("--agl-python", help="interpreter of an environment with agentlightning 1.0.2")
    parser.add_argument("--nginx", help="nginx binary")
    parser.add_argument("--folder", type=Path, help="where stores are put while it runs")
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    return parser.parse_args()


def main() -> None:
    given = parsed()
    wanted = given.only or ("plain", "latency", "streams", "growth")
    found: Json = {"machine": _machine(), "command": sys.argv}
    print(found["machine"], flush=True)
    report = Report()
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        direct = stack.enter_context(targets.upstream())
        base = _base(direct)
        chosen: dict[str, Target] = {}
        for name, mode in (("train", Mode.TRAIN), ("record", Mode.RECORD), ("passthrough", Mode.PASSTHROUGH)):
            chosen[name] = stack.enter_context(targets.outrider(name, mode, base, folder))
        normal = stack.enter_context(targets.outrider("train-normal", Mode.TRAIN, base, folder, synchronous="NORMAL"))
        beside: list[Target] = []
        if given.agl_python:
            beside.append(stack.enter_context(targets.agentlightning(given.agl_python, base, folder)))
        if given.nginx:
            beside.append(stack.enter_context(targets.nginx(given.nginx, base, folder)))
        everybody = [*chosen.values(), *beside, direct]
        for target in (*everybody, normal):
            if load(target, 4, 1.0)["errors"]:
                raise SystemExit(f"{target.name} answers with errors; see what it says in its log")
        if "plain" in wanted:
            found["plain"] = plain(report, everybody, given.rounds, given.seconds, given.fresh)
        if "latency" in wanted:
            some = [chosen["train"], normal, chosen["record"], *(b for b in beside if b.name == "nginx"), direct]
            found["latency"] = latency(report, some, given.rounds, given.seconds, folder)
        if "streams" in wanted:
            found["streams"] = streams(report, [*chosen.values(), direct], given.rounds, given.seconds)
            paced(report, folder, given.seconds)
        if "growth" in wanted:
            found["growth"] = growth(report, base, folder, given.growth_calls)
    found["figures"] = report.figures
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def _machine() -> str:
    load_average = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores of {targets.cpu_name()}, Python {platform.python_version()}, load {load_average}"


if __name__ == "__main__":
    main()
