"""The table of all runs, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from harnesses.bench import Outcome
from harnesses.install import Installed

HEAD = ("harness", "version", "dialect", "streamed", "calls", "fidelity", "samples", "seconds", "install", "result")


def to_markdown(outcomes: Sequence[Outcome], installs: Mapping[str, Installed]) -> str:
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for outcome in outcomes:
        installed = installs.get(outcome.harness)
        rows.append(
            (
                outcome.harness,
                outcome.version,
                outcome.dialect.value + (f" ({outcome.label})" if outcome.label else ""),
                "yes" if outcome.streamed else "no",
                str(outcome.calls),
                ", ".join(f"{count} {name}" for name, count in outcome.fidelity.items()) or "–",
                str(outcome.samples),
                f"{outcome.seconds:.0f}",
                f"{installed.seconds:.0f} s, {installed.bytes >> 20} MiB" if installed else "–",
                "ok" if outcome.ok else "; ".join(outcome.problems).replace("|", "/"),
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def to_json(outcomes: Sequence[Outcome], installs: Mapping[str, Installed]) -> str:
    found = []
    for outcome in outcomes:
        record = asdict(outcome) | {"ok": outcome.ok}
        installed = installs.get(outcome.harness)
        if installed is not None:
            record |= {"install_seconds": installed.seconds, "install_bytes": installed.bytes}
        found.append(record)
    return json.dumps(found, indent=1) + "\n"
