"""Tokens a second from recorded calls to training rows, memory against distinct tokens, and rows of interleaved agents.

python bench/trajectory.py

Speed: a rollout of 400 calls whose prompts hold 4,000 tokens on average (the talk grows with each turn), in the order
of recording and shuffled, one that branches, and one with four answers a call (the worst for a radix tree: it is
split at every turn); `build` alone and with `samples`. Memory: what the tree and the
building of it take (tracemalloc, which counts numpy's arrays), for calls that are handed over one by one, as a talk
grows: total prompt tokens grow with its square, distinct ones linearly.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.trajectory import build
from outrider.types import Call, CallState, Choice, Fidelity, IntArray

CALLS = 400
PROMPT = 4_000
VOCABULARY = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    figures = {"speed": speed(args.repeats), "memory": memory(), "interleaved": interleaved()}
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print_tables(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


def make_call(seq: int, prompt: IntArray, *answers: IntArray) -> Call:
    choices = tuple(
        Choice(
            index=index,
            token_ids=answer,
            logprobs=np.full(len(answer), -0.5, dtype=np.float32),
            finish_reason="stop",
        )
        for index, answer in enumerate(answers)
    )
    return Call(
        id=f"c{seq}",
        attempt_id="a",
        dialect="openai_chat",
        model="policy",
        state=CallState.COMPLETE,
        status=200,
        streamed=False,
        request=b"",
        response=b"",
        prompt_ids=prompt,
        choices=choices,
        usage=None,
        fidelity=Fidelity.EXACT,
        version_start=0,
        version_end=0,
        seq=seq,
    )


def talk(turns: int, first: int, turn: int, seed: int = 0, answers: int = 1) -> Iterator[Call]:
    """One agent: each prompt is the last prompt, its last answer and a tool's result. Half of a turn is sampled."""
    rng = np.random.default_rng(seed)
    sequence = rng.integers(0, VOCABULARY, first, dtype=np.int32)
    for seq in range(turns):
        sampled = [rng.integers(0, VOCABULARY, turn // 2, dtype=np.int32) for _ in range(answers)]
        yield make_call(seq, sequence, *sampled)
        result = rng.integers(0, VOCABULARY, turn - turn // 2, dtype=np.int32)
        sequence = np.concatenate([sequence, sampled[-1], result])


def branching(turns: int, first: int, turn: int) -> Iterator[Call]:
    """Every eighth call edits the history: it goes on from the middle of an earlier talk."""
    rng = np.random.default_rng(1)
    known = [rng.integers(0, VOCABULARY, first, dtype=np.int32)]
    for seq in range(turns):
        prompt = known[-1] if seq % 8 else known[rng.integers(len(known))][: first + turn]
        answer = rng.integers(0, VOCABULARY, turn // 2, dtype=np.int32)
        yield make_call(seq, prompt, answer)
        known.append(np.concatenate([prompt, answer, rng.integers(0, VOCABULARY, turn - turn // 2, dtype=np.int32)]))


def speed(repeats: int) -> list[dict[str, Any]]:
    turn = 10
    ordered = list(talk(CALLS, PROMPT - CALLS * turn // 2, turn))
    shuffled = random.Random(0).sample(ordered, len(ordered))
    branches = list(branching(CALLS, PROMPT - 4 * turn, turn))
    found = []
    best_of = list(talk(CALLS, PROMPT - CALLS * turn // 2, turn, answers=4))
    workloads = {
        "one talk, as recorded": ordered,
        "one talk, shuffled": shuffled,
        "branching": branches,
        "four answers a call": best_of,
    }
    for name, calls in workloads.items():
        tree = build(calls)
        build_s = measured(lambda calls=calls: build(calls), repeats)
        cut_s = measured(lambda tree=tree: tree.samples(rollout_id="r", group_id="g"), repeats)
        found.append(
            {
                "name": name,
                "calls": len(calls),
                "tokens": tree.tokens,
                "unique": tree.unique_tokens,
                "rows": len(tree.samples(rollout_id="r", group_id="g").samples),
                "build_s": build_s,
                "cut_s": cut_s,
                "tokens_per_s": tree.tokens / build_s,
                "with_rows_per_s": tree.tokens / (build_s + cut_s),
            }
        )
    return found


def measured(work: Callable[[], object], repeats: int) -> float:
    """Median CPU seconds of this process: it is one thread, and other processes may be busy."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def memory() -> list[dict[str, Any]]:
    found = []
    for turns in (100, 200, 400, 800):
        gc.collect()
        tracemalloc.start()
        tree = build(talk(turns, 2_000, 100))
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.append({"turns": turns, "tokens": tree.tokens, "unique": tree.unique_tokens, "held": held, "peak": peak})
    return found


def interleaved() -> dict[str, int]:
    """Two agents of four turns each on one key, their calls taking turns."""
    first, second = list(talk(4, 500, 40, seed=1)), list(talk(4, 500, 40, seed=2))
    calls = []
    for pair in zip(first, second, strict=True):
        calls += [make_call(len(calls) + i, one.prompt_ids, one.choices[0].token_ids) for i, one in enumerate(pair)]
    samples = build(calls).samples(rollout_id="r", group_id="g").samples
    return {"calls": len(calls), "samples": len(samples)}


def print_tables(figures: dict[str, Any]) -> None:
    print("\n| rollout | calls | tokens | distinct | rows | build, ms | M tokens/s | with rows, M tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for one in figures["speed"]:
        print(
            f"| {one['name']} | {one['calls']} | {one['tokens']:,} | {one['unique']:,} | {one['rows']} |"
            f" {1e3 * one['build_s']:.1f} | {one['tokens_per_s'] / 1e6:.0f} | {one['with_rows_per_s'] / 1e6:.0f} |"
        )
    print("\n| turns | tokens | distinct | tree, MB | bytes a distinct token | peak while building, MB |")
    print("|---|---|---|---|---|---|")
    for one in figures["memory"]:
        print(
            f"| {one['turns']} | {one['tokens']:,} | {one['unique']:,} | {one['held'] / 1e6:.2f} |"
            f" {one['held'] / one['unique']:.1f} | {one['peak'] / 1e6:.2f} |"
        )
    rows = figures["interleaved"]
    print(f"\nTwo interleaved agents of four turns: {rows['samples']} samples of {rows['calls']} calls.")


if __name__ == "__main__":
    main()
