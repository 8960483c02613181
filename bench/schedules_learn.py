"""Learning curves of the quickstart under each schedule, with the same seed, side by side.

python bench/schedules_learn.py --out runs/schedules --plot schedules.png

A finished run folder is read, not run again. `--set` changes keys of all runs, as for a quick look:

python bench/schedules_learn.py --set train.steps=2 --set train.groups=2 --set train.group_size=2 --set eval.limit=4
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SCHEDULES = ("sync", "collocated", "disaggregated")
COLOURS = ("#2563c9", "#c9690f", "#2f8f4e")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--staleness", type=int, default=1, help="train.max_staleness of the two that carry over")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the run file")
    parser.add_argument("--out", type=Path, default=Path("runs/schedules"), help="folders go to OUT/SCHEDULE-SEED")
    parser.add_argument("--plot", type=Path, help="write a PNG here")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    found = [measure(schedule, seed, args) for schedule in args.schedules for seed in args.seeds]
    print(f"\n{platform.machine()}, Python {platform.python_version()}, seeds {args.seeds}")
    print_tables(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    if args.plot:
        plot(found, args.plot)


def measure(schedule: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the quickstart, or go on with it, and read what it left behind."""
    folder = args.out / f"{schedule}-{seed}"
    command = [sys.executable, "-m", "outrider", "quickstart", "--seed", str(seed), "--out", str(folder)]
    keys = [f"train.schedule={schedule}", f"train.max_staleness={args.staleness}", *args.set]
    subprocess.run([*command, *(part for key in keys for part in ("-o", key))], check=True)
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    return {
        "schedule": schedule,
        "seed": seed,
        "before": summary["before"]["greedy"],
        "after": summary["after"]["greedy"],
        "sampled": summary["after"]["sampled"],
        "reward": [step["reward_mean"] for step in steps],
        "success": [step["success"] for step in steps],
        "lag": [lag(before, step) for before, step in zip([None, *steps], steps, strict=False)],
        "dropped": sum(n for step in steps for why, n in step["excluded"].items() if why.startswith("group: over")),
        "step_s": statistics.fmean(step["times"]["total"] for step in steps) if steps else 0.0,
        "idle_s": statistics.fmean(step["times"]["rollouts"] for step in steps) if steps else 0.0,
    }


def lag(before: dict[str, Any] | None, step: dict[str, Any]) -> int:
    """Policy versions between the weights that the step changed and its oldest token."""
    oldest = step["oldest_version"]
    return 0 if before is None or oldest is None else int(before["policy_version"] - oldest)


def print_tables(found: list[dict[str, Any]]) -> None:
    heads = "schedule | seed | greedy before | greedy after (95%) | sampled after | step, s | waits, s | lag | dropped"
    print(f"\n| {heads} |")
    print("|---" * 9 + "|")
    for run in found:
        after = run["after"]
        print(
            f"| {run['schedule']} | {run['seed']} | {run['before']['success']:.1%} |"
            f" {after['success']:.1%} ({after['low']:.1%}–{after['high']:.1%}) | {run['sampled']['success']:.1%} |"
            f" {run['step_s']:.1f} | {run['idle_s']:.1f} | {max(run['lag'], default=0)} | {run['dropped']} |"
        )
    print("\nSuccess of training rollouts, mean over seeds\n")
    names = list(dict.fromkeys(run["schedule"] for run in found))
    print("| step | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for step in range(max(len(run["success"]) for run in found)):
        cells = []
        for name in names:
            values = [run["success"][step] for run in found if run["schedule"] == name and step < len(run["success"])]
            cells.append(f"{statistics.fmean(values):.1%}" if values else "–")
        print(f"| {step + 1} | " + " | ".join(cells) + " |")


def plot(found: list[dict[str, Any]], file: Path) -> None:
    """Success of training rollouts by step, a line a run, and held-out success at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = list(dict.fromkeys(run["schedule"] for run in found))
    for run in found:
        colour = COLOURS[names.index(run["schedule"])]
        first = run is next(other for other in found if other["schedule"] == run["schedule"])
        steps = range(1, len(run["success"]) + 1)
        axes.plot(steps, run["success"], color=colour, alpha=0.7, label=run["schedule"] if first else None)
        end, after = len(run["success"]) + 0.6 + 0.3 * names.index(run["schedule"]), run["after"]
        errors = [[after["success"] - after["low"]], [after["high"] - after["success"]]]
        axes.errorbar([end], [after["success"]], yerr=errors, color=colour, marker="D", markersize=4, capsize=2)
    axes.set_xlabel("training step (diamonds: held-out tasks, greedy, after; 95%)")
    axes.set_ylabel("success of training rollouts")
    axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    canvas.print_png(str(file))
    print(f"\nPlot: {file}")


if __name__ == "__main__":
    main()
