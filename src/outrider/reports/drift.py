"""`outrider drift`: what broke the continuity of tokens, per harness and turn, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.reports.text import one_line
from outrider.types import Json

_PIPE_WIDTH = 300


def print_drift(report: Json, console: Console) -> None:
    """Print what `outrider.trajectory.drift.Drift.report` gives. Turns without a break are summed up in one line."""
    if not report["calls"]:
        console.print("There are no calls to look at.")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("harness", "turn", "calls", "breaks", "computed anew", "of prompt", "cause"):
        table.add_column(title, justify="left" if title in ("harness", "cause") else "right")
    for harness in report["harnesses"]:
        name = Text(one_line(harness["harness"], 60), "bold")
        table.add_row(name, "all", *_cells(harness), "")
        for turn in harness["turns"]:
            for place, (cause, found) in enumerate(turn["causes"].items()):
                words = f"{cause}: {found['calls']:,} calls, {found['recomputed_tokens']:,} tokens"
                cells = ["", str(turn["turn"]), *_cells(turn)] if place == 0 else [""] * 6
                table.add_row(*cells, Text(one_line(words, 120)))
    if console.is_terminal:
        console.print(table)
    else:  # a pipe has no width, and lines that are cut or broken are no use to grep
        Console(file=console.file, width=_PIPE_WIDTH, color_system=None).print(table)
    console.print()
    console.print(_summary(report))


def _cells(part: Json) -> list[str]:
    share = part["recomputed_tokens"] / part["prompt_tokens"] if part["prompt_tokens"] else 0.0
    return [f"{part['calls']:,}", f"{part['breaks']:,}", f"{part['recomputed_tokens']:,}", f"{share:.1%}"]


def _summary(report: Json) -> str:
    inexact = report["calls"] - report["exact_calls"]
    lines = [
        f"{report['rollouts']:,} rollouts, {report['calls']:,} calls"
        + (f", of which {inexact:,} without exact tokens are not looked at" if inexact else "")
        + ".",
        f"{report['breaks']:,} breaks: {report['rows']:,} rows, {report['rows_without_breaks']:,} without them; "
        f"{report['recomputed_tokens']:,} prompt tokens computed anew.",
        f"{report['prompt_tokens']:,} prompt tokens were sent; {report['unique_tokens']:,} tokens are distinct.",
    ]
    return "\n".join(lines)
