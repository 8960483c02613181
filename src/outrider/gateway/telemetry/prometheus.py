"""Metrics in Prometheus' text format (version 0.0.4), written by hand.

A call costs some two microseconds: one dictionary entry and three bisections. All else is read when somebody asks. No
label holds what an agent chose, so the number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from outrider.gateway.telemetry.note import Note
from outrider.types import Json

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COMMIT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What is true at the moment of asking."""

    in_flight: int
    """Requests under way."""
    upstream_in_flight: int
    """Those of them that were admitted."""
    store_queue: int
    """Writes that are not durable yet."""
    paused: bool
    draining: bool
    policy_version: int | None
    log_lines_lost: int
    upstreams: Sequence[Json] = ()
    """State of each replica: ``replica``, and numbers."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations at or below each of `bounds`, and above them all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Satisfies `note.Observer`. Counts since the start of the process."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str, str, int], int] = {}
        self._latency: dict[tuple[str, str], Histogram] = {}
        self._first_token: dict[tuple[str, str], Histogram] = {}
        self._commit = Histogram(COMMIT_S)
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._dropped = 0
        self._retries: dict[str, int] = {}

    def ended(self, note: Note) -> None:
        call, kind = note.call, (note.dialect, note.mode)
        key = (*kind, call.fidelity if call else "", call.state if call else "", note.status)
        self._calls[key] = self._calls.get(key, 0) + 1
        if kind not in self._latency:
            self._latency[kind] = Histogram(LATENCY_S)
            self._first_token[kind] = Histogram(LATENCY_S)
        self._latency[kind].observe(note.duration_s)
        if call is not None:
            self._commit.observe(note.commit_s)
            if call.first_token_s is not None:
                self._first_token[kind].observe(call.first_token_s)
            for retry in call.retries:
                status = str(retry.status or "none")
                self._retries[status] = self._retries.get(status, 0) + 1
            if call.usage is not None:
                self._prompt_tokens += call.usage.prompt_tokens
                self._completion_tokens += call.usage.completion_tokens
        elif note.dropped:
            self._dropped += 1

    def render(self, counters: Json, gauges: Gauges) -> bytes:
        """`counters` is a snapshot of `counters.Counters`."""
        lines = [*self._of_calls(), *_of_counters(counters), *_of_gauges(gauges), *_of_process()]
        return ("\n".join(lines) + "\n").encode()

    def _of_calls(self) -> Iterator[str]:
        names = ("dialect", "mode", "fidelity", "state", "status")
        calls: dict[Labels, int] = {
            tuple(zip(names, map(str, key), strict=True)): count for key, count in self._calls.items()
        }
        yield from _family("outrider_calls_total", "counter", "Model calls that have ended.", calls)
        told = "From a call's arrival to the end of its answer."
        yield from _histograms("outrider_call_duration_seconds", told, self._latency)
        told = "From the upstream request to the first event of a stream."
        yield from _histograms("outrider_first_token_seconds", told, self._first_token)
        yield from _head("outrider_commit_seconds", "histogram", "What a recorded call waited for the store.")
        yield from _histogram("outrider_commit_seconds", (), self._commit)
        tokens: dict[Labels, int] = {
            (("kind", "prompt"),): self._prompt_tokens,
            (("kind", "completion"),): self._completion_tokens,
        }
        yield from _family("outrider_tokens_total", "counter", "Tokens of recorded calls, as usage told.", tokens)
        told = "Sendings that were followed by another one, by the upstream's status."
        yield from _family("outrider_upstream_retries_total", "counter", told, _one_label("status", self._retries))
        told = "Calls answered that should be in the store and are not."
        yield from _family("outrider_dropped_total", "counter", told, {(): self._dropped})


def _of_counters(counters: Json) -> Iterator[str]:
    for name, label, told in (
        ("refused", "code", "Calls that never went upstream, by reason."),
        ("not_recorded", "reason", "Calls that could not be stored, and so were not answered as if they had been."),
        ("broken", "reason", "Recorded calls whose tokens don't add up, by what is wrong."),
        ("forced_tools", "call", "Answers to requests that force a tool call, sampled freely: was it made?"),
        ("left_out", "what", "Parts of translated requests that the upstream's protocol has no word for."),
        ("redacted", "kind", "Parts that were taken out of calls before storage."),
    ):
        yield from _family(f"outrider_{name}_total", "counter", told, _one_label(label, counters[name]))
    continued = {_outcome(text): count for text, count in counters["continuation"].items()}
    told = "How the prompts of attempts' calls came about; for a break, its cause."
    yield from _family("outrider_continuations_total", "counter", told, continued)
    sources: dict[Labels, int] = {}
    for text, count in counters["rewards"].items():
        labels = (("source", text.partition(" ")[0]),)
        sources[labels] = sources.get(labels, 0) + count
    yield from _family("outrider_rewards_total", "counter", "Rewards and feedback over HTTP.", sources)
    for name, told in (
        ("forwarded", "Calls that were passed through."),
        ("unsampled", "Calls of trajectories that the sample rate leaves out."),
    ):
        yield from _family(f"outrider_{name}_total", "counter", told, {(): counters[name]})


def _of_gauges(gauges: Gauges) -> Iterator[str]:
    for name, told, value in (
        ("in_flight", "Requests under way.", gauges.in_flight),
        ("upstream_in_flight", "Calls that were admitted and have not ended.", gauges.upstream_in_flight),
        ("store_queue", "Writes that are not durable yet.", gauges.store_queue),
        ("paused", "1 while new calls are held back.", int(gauges.paused)),
        ("draining", "1 from the signal to end on.", int(gauges.draining)),
    ):
        yield from _family(f"outrider_{name}", "gauge", told, {(): value})
    if gauges.policy_version is not None:
        told = "Successful publishes of weights."
        yield from _family("outrider_policy_version", "gauge", told, {(): gauges.policy_version})
    lost: dict[Labels, int] = {(): gauges.log_lines_lost}
    yield from _family("outrider_log_lines_lost_total", "counter", "Log lines that nobody took in.", lost)
    numbers = sorted({name for state in gauges.upstreams for name in state if name != "replica"})
    for name in numbers:
        kind = "gauge" if name in ("up", "in_flight", "pinned") else "counter"
        values: dict[Labels, float] = {
            (("replica", str(state["replica"])),): float(state[name]) for state in gauges.upstreams
        }
        full = f"outrider_upstream_replica_{name}" + ("_total" if kind == "counter" else "")
        yield from _family(full, kind, f"Of an upstream: {name.replace('_', ' ')}.", values)


def _of_process() -> Iterator[str]:
    process = psutil.Process()
    times = process.cpu_times()
    for name, kind, value in (
        ("process_resident_memory_bytes", "gauge", float(process.memory_info().rss)),
        ("process_cpu_seconds_total", "counter", times.user + times.system),
        ("process_start_time_seconds", "gauge", process.create_time()),
        ("process_open_fds", "gauge", float(process.num_fds())),
    ):
        yield from _family(name, kind, "Of the gateway's process.", {(): value})


# -- the format --------------------------------------------------------------------------------------------------------


def _family(name: str, kind: str, told: str, values: Mapping[Labels, float]) -> Iterator[str]:
    yield from _head(name, kind, told)
    for labels, value in values.items():
        yield f"{name}{_braces(labels)} {value}"


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _histograms(name: str, told: str, found: Mapping[tuple[str, str], Histogram]) -> Iterator[str]:
    yield from _head(name, "histogram", told)
    for (dialect, mode), histogram in found.items():
        yield from _histogram(name, (("dialect", dialect), ("mode", mode)), histogram)


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    count = 0
    for bound, more in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        count += more
        yield f"{name}_bucket{_braces((*labels, ('le', bound)))} {count}"
    yield f"{name}_sum{_braces(labels)} {histogram.total}"
    yield f"{name}_count{_braces(labels)} {count}"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _one_label(name: str, counts: Mapping[str, int]) -> dict[Labels, int]:
    return {((name, value),): count for value, count in counts.items()}


def _outcome(text: str) -> Labels:
    outcome, _, cause = text.partition(": ")
    return (("outcome", outcome), ("cause", cause))
