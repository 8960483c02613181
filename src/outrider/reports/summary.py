"""`summary.json`: the few numbers of a run that a script wants."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from outrider.reports.history import write_atomically

_KEYS = ("success", "n", "low", "high")


def write_summary(
    run_dir: Path,
    *,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    wall_s: float,
    peak_rss_bytes: int,
    seed: int,
    model: str,
    steps: int,
    best: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``summary.json`` atomically and return its path. Raises `SetupError`.

    `before` and `after` are the ``eval`` records of metrics.jsonl, or anything with ``greedy`` and ``sampled`` in it;
    of those, ``success``, ``n``, ``low`` and ``high`` (95% interval) are kept. None where no evaluation was made.
    `best` is which weights ``RUN/best`` holds.
    """
    content = {
        "before": _measured(before),
        "after": _measured(after),
        "wall_s": wall_s,
        "peak_rss_bytes": peak_rss_bytes,
        "seed": seed,
        "model": model,
        "steps": steps,
        "best": None if best is None else {key: best[key] for key in ("name", "step", "policy_version", "score")},
    }
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    return write_atomically(run_dir / "summary.json", encoded + b"\n")


def _measured(record: Mapping[str, Any] | None) -> dict[str, dict[str, Any]] | None:
    if record is None:
        return None
    return {
        how: {key: record[how].get(key) for key in _KEYS}
        for how in ("greedy", "sampled")
        if record.get(how) is not None
    }
