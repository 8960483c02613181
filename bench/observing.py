"""What it costs a call to be counted, logged and traced: CPU, of all threads.

python bench/observing.py [--calls N] [--json PATH]      needs the extra otel
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.logs import CallLog, LogWriter
from outrider.gateway.telemetry.note import Note, Observer
from outrider.gateway.telemetry.prometheus import Gauges, Metrics
from outrider.gateway.telemetry.tracing import Tracer
from outrider.types import Call, CallState, Choice, Fidelity, Mode, Usage

ROUNDS = 5
GAUGES = Gauges(
    in_flight=0, upstream_in_flight=0, store_queue=0, paused=False, draining=False, policy_version=1, log_lines_lost=0
)  # fmt: skip


def a_call() -> Call:
    ids = np.arange(20, dtype=np.int32)
    return Call(
        id="c" * 48,
        attempt_id="attempt-1",
        dialect="openai_chat",
        model="policy",
        state=CallState.COMPLETE,
        status=200,
        streamed=True,
        request=b"{}",
        response=b"{}",
        prompt_ids=ids,
        choices=(Choice(index=0, token_ids=ids, logprobs=ids.astype(np.float32), finish_reason="stop"),),
        usage=Usage(prompt_tokens=20, completion_tokens=20),
        fidelity=Fidelity.EXACT,
        sampling={"temperature": 1.0, "max_tokens": 64},
        first_token_s=0.05,
        version_start=1,
    )


def one(call: Call, observers: list[Observer]) -> None:
    """As the gateway does for a recorded call."""
    note = Note(dialect=call.dialect)
    note.call_id, note.attempt_id, note.model, note.streamed = call.id, call.attempt_id, call.model, True
    note.mode, note.kept = Mode.TRAIN, True
    note.call, note.commit_s = call, 0.001
    note.end(200)
    for observer in observers:
        observer.ended(note)


def microseconds(calls: int, make: Callable[[], tuple[list[Observer], Callable[[], object]]]) -> float:
    """CPU a call, the best of `ROUNDS`. `make` gives the observers of a round and what ends their work."""
    call = a_call()
    found = []
    for _ in range(ROUNDS):
        observers, finish = make()
        began = time.process_time()
        for _ in range(calls):
            one(call, observers)
        finish()
        found.append((time.process_time() - began) / calls * 1e6)
    return min(found)


def with_log() -> tuple[list[Observer], Callable[[], object]]:
    writer = LogWriter(io.StringIO())
    return [Metrics(), CallLog(writer, level="info", format="json")], writer.close


def with_spans() -> tuple[list[Observer], Callable[[], object]]:
    processor = BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=1 << 17)
    tracer = Tracer(processor)
    return [Metrics(), tracer], tracer.close


def measure(calls: int) -> dict[str, float]:
    metrics = Metrics()
    found = {
        "a note alone": microseconds(calls, lambda: ([], lambda: None)),
        "with metrics (the default)": microseconds(calls, lambda: ([metrics], lambda: None)),
        "with metrics and a line of JSON each": microseconds(min(calls, 5000), with_log),
        "with metrics and spans": microseconds(min(calls, 5000), with_spans),
    }
    began = time.process_time()
    for _ in range(100):
        metrics.render(Counters().snapshot(), GAUGES)
    found["a scrape of /metrics"] = (time.process_time() - began) / 100 * 1e6
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="calls a round")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    figures = measure(arguments.calls)
    for name, value in figures.items():
        print(f"{name:40} {value:8.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
