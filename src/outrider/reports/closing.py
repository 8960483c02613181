"""What a run says when it is done: what came of it, and what to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from outrider.reports.history import History, dig, share
from outrider.reports.text import aligned_percent, duration, finite, gigabytes, number, one_line, tally


def closing_words(history: History, note: str = "") -> str:
    """Some lines for a terminal, from the files of a finished run. `note` is one more sentence."""
    folder = shown_path(history.path)
    lines = ["", *_success(history), *_effort(history), *_lessons(history), *([note] if note else []), ""]
    command, typed = program(), shlex.quote(folder)
    rows = [("Report", f"{folder}/report.html"), ("All rollouts", f"{command} inspect {typed}")]
    after = history.after
    if after is not None:
        rows.append(("Held-out", f"{command} inspect {typed} --split {one_line(str(after.get('name')))}/greedy"))
    rows.append(("Continuity", f"{command} drift {typed}"))
    best = finite(dig(history.summary, "best", "step"))
    if best is not None:
        rows.append(("Serve the best", f"{command} engine --model {typed}/best  # step {number(best)}"))
    rows.append(
        ("Go on", f"the same command with more steps, such as -o train.steps={2 * (history.steps_wanted or 1)}")
    )
    width = max(len(name) for name, _ in rows)
    return "\n".join([*lines, *(f"{name:<{width}}  {text}" for name, text in rows)])


def program() -> str:
    """How this program is called here: a virtual environment that isn't activated has it under its path only."""
    script, on_path = Path(sys.executable).with_name("outrider"), shutil.which("outrider")
    if not script.exists():
        return f"{shown_path(Path(sys.executable))} -m outrider"
    return "outrider" if on_path and os.path.samefile(on_path, script) else shown_path(script)


def shown_path(path: Path) -> str:
    """`path` from here, if it lies below."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _success(history: History) -> list[str]:
    lines = []
    for how in ("greedy", "sampled"):
        before, after = share(history.before, how), share(history.after, how)
        if before is not None and after is not None:
            points = 100 * (after.value - before.value)
            change = f"{aligned_percent(before.value):>6} → {aligned_percent(after.value):>6}  {points:+.1f} points"
            lines.append(f"  {how:<8} {change}  on {after.base}")
    return ["Held-out success, before → after:", *lines] if lines else ["No held-out tasks were measured."]


def _effort(history: History) -> list[str]:
    wall, memory = (history.summary.get(name) for name in ("wall_s", "peak_rss_bytes"))
    steps = "1 step" if len(history.steps) == 1 else f"{len(history.steps)} steps"
    lines = [f"{steps} in {duration(wall)}, {gigabytes(memory)} of memory at the peak."]
    failures = history.counts("failures")
    if failures:
        lines.append(f"Attempts that failed and were tried again or left out: {one_line(tally(failures), 200)}.")
    return lines


def _lessons(history: History) -> list[str]:
    """What to do about a run in which most steps taught nothing."""
    idle = sum(1 for record in history.steps if not record.get("groups_trained"))
    if not history.steps or idle * 2 < len(history.steps):
        return []
    return [
        f"{idle} of {len(history.steps)} steps had nothing to learn from: in each group all rewards were equal.",
        "Look at a few rollouts, then give credit for a part of the way, easier tasks, more rollouts a group, or begin",
        "with a model that succeeds sometimes.",
    ]
