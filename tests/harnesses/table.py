"""The table of all runs, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from harnesses.bench import BROKE, ENGINE, Outcome
from harnesses.install import Installed

HEAD = (
    *("harness", "version", "dialect", "streamed", "calls", "fidelity", "conversations", "samples", "rendered anew"),
    *("breaks", "seconds", "install", "result"),
)


def to_markdown(outcomes: Sequence[Outcome], installs: Mapping[str, Installed]) -> str:
    """A row for each variant. Where several runs of one came to different values, all are given, as `1 / 20`."""
    runs: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for outcome in outcomes:
        head, *values = _cells(outcome, installs.get(outcome.harness))
        runs.setdefault(head, []).append(tuple(values))
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for head, found in runs.items():
        rows.append((*head, *(" / ".join(dict.fromkeys(values)) for values in zip(*found, strict=True))))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(outcome: Outcome, installed: Installed | None) -> tuple[tuple[str, ...], str, ...]:
    """What names a variant, then what a run of it came to."""
    variant = (
        outcome.harness,
        outcome.version,
        outcome.dialect.value + (f" ({outcome.label})" if outcome.label else ""),
        "yes" if outcome.streamed else "no",
    )
    return (
        variant,
        str(outcome.calls),
        ", ".join(f"{count} {name}" for name, count in outcome.fidelity.items()) or "–",
        str(outcome.prompts.get("opened", 0)) if outcome.samples_anew is not None else "–",
        str(outcome.samples),
        "–" if outcome.samples_anew is None else str(outcome.samples_anew),
        breaks(outcome),
        f"{outcome.seconds:.0f}",
        f"{installed.seconds:.0f} s, {installed.bytes >> 20} MiB" if installed else "–",
        "ok" if outcome.ok else "; ".join(outcome.problems).replace("|", "/"),
    )


def breaks(outcome: Outcome) -> str:
    found = [f"{count} {how.removeprefix(BROKE)}" for how, count in outcome.prompts.items() if how.startswith(BROKE)]
    left = [f"{count} left to {how}" for how, count in outcome.prompts.items() if how.startswith(ENGINE)]
    return ", ".join(found + left + [f"{count} {note}" for note, count in outcome.notes.items()]) or "–"


def to_json(outcomes: Sequence[Outcome], installs: Mapping[str, Installed]) -> str:
    found = []
    for outcome in outcomes:
        record = asdict(outcome) | {"ok": outcome.ok}
        installed = installs.get(outcome.harness)
        if installed is not None:
            record |= {"install_seconds": installed.seconds, "install_bytes": installed.bytes}
        found.append(record)
    return json.dumps(found, indent=1) + "\n"
