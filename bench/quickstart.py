"""The quickstart over several seeds: success before and after, wall time, memory, and where the time of a step goes.

python bench/quickstart.py --seeds 0 1 2 --out runs/bench --json quickstart.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PARTS = ("rollouts", "samples", "forward_backward", "publish", "rest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="run folders go to OUT/seed-N")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    found = [measure(seed, args.out / f"seed-{seed}") for seed in args.seeds]
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    print_table(found)


def measure(seed: int, folder: Path) -> dict[str, Any]:
    """Run (or, if it is there already, read) the quickstart with this seed."""
    command = [sys.executable, "-m", "outrider", "quickstart", "--seed", str(seed), "--out", str(folder)]
    subprocess.run(command, check=True)
    return read(seed, folder)


def read(seed: int, folder: Path) -> dict[str, Any]:
    """The figures of a finished run. A skipped step has no update and no publish: they count as 0 s there."""
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "seed": seed,
        "summary": summary,
        "train_s": sum(step["times"]["total"] for step in steps),
        "parts": {part: statistics.mean(step["times"].get(part, 0.0) for step in steps) for part in ("total", *PARTS)},
        "tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps),
        "logprob_diff_mean": steps[0]["logprob_diff_mean"],
        "logprob_diff_max": steps[0]["logprob_diff_max"],
    }


def print_table(found: list[dict[str, Any]]) -> None:
    print("\n| seed | greedy before → after | sampled before → after | wall, min | training, min | peak memory, GB |")
    print("|---|---|---|---|---|---|")
    for run in found:
        summary = run["summary"]
        cells = [
            f"{summary['before'][kind]['success']:.1%} → {summary['after'][kind]['success']:.1%}"
            f" ({100 * (summary['after'][kind]['success'] - summary['before'][kind]['success']):+.1f} points)"
            for kind in ("greedy", "sampled")
        ]
        wall, peak = summary["wall_s"] / 60, summary["peak_rss_bytes"] / 1e9
        print(f"| {run['seed']} | {cells[0]} | {cells[1]} | {wall:.1f} | {run['train_s'] / 60:.1f} | {peak:.1f} |")
    print("\n| seed | step, s | " + " | ".join(f"{part}, s" for part in PARTS) + " | rest, % | engine tokens/s |")
    print("|---" * (len(PARTS) + 4) + "|")
    for run in found:
        parts = run["parts"]
        shown = " | ".join(f"{parts[part]:.2f}" for part in PARTS)
        print(
            f"| {run['seed']} | {parts['total']:.1f} | {shown} | {parts['rest'] / parts['total']:.1%} |"
            f" {run['tokens_per_s']:.0f} |"
        )
    print("\n| seed | engine against trainer before any update, nats: mean | max |")
    print("|---|---|---|")
    for run in found:
        print(f"| {run['seed']} | {run['logprob_diff_mean']:.4f} | {run['logprob_diff_max']:.3f} |")


if __name__ == "__main__":
    main()
