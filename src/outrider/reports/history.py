"""A run folder as the report sees it: read with patience, since the run may be unfinished or killed mid-line."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, SetupError
from outrider.reports.text import finite
from outrider.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What the files of a run tell. Steps and evaluations are in order of `step`, one each, the newest of equals."""

    path: Path
    config: Json = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    steps: tuple[Json, ...] = ()
    evals: tuple[Json, ...] = ()
    problems: tuple[str, ...] = ()
    """Sentences on what could not be read."""

    @property
    def steps_wanted(self) -> int | None:
        steps = _dict(self.config.get("train")).get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def success_from(self) -> float:
        """The reward from which a rollout counts as a success."""
        threshold = finite(_dict(self.config.get("reward")).get("success"))
        return 1.0 if threshold is None else threshold

    @property
    def before(self) -> Json | None:
        return self.evaluation("before")

    @property
    def after(self) -> Json | None:
        """The evaluation at the end, or the newest so far; None where there is none but the first."""
        return self.evaluation("after") or next((r for r in reversed(self.evals) if r.get("name") != "before"), None)

    @property
    def finished(self) -> bool:
        """The last step is done and measured. An ``after`` of a run that was given more steps since is not the last."""
        after = self.evaluation("after")
        return after is not None and finite(after.get("step", self.steps_wanted)) == self.steps_wanted

    def evaluation(self, name: str) -> Json | None:
        """From the metrics; from the summary only where those lack it, since it may be of an earlier, shorter run."""
        for record in self.evals:
            if record.get("name") == name:
                return record
        found = self.summary.get(name)
        return found if isinstance(found, dict) and found else None

    def column(self, *keys: str) -> list[float | None]:
        """One number of each step, None where it is missing or not finite; `keys` lead into nested objects."""
        return [finite(dig(record, *keys)) for record in self.steps]

    def counts(self, key: str) -> Counter[str]:
        """Sum over steps and evaluations of the counters under `key` (``excluded``, ``failures``)."""
        total: Counter[str] = Counter()
        for record in (*self.steps, *self.evals):
            total.update(counters(record, key))
        return total


def dig(tree: Any, *keys: str) -> Any:
    """The value under nested `keys`, None where a level is missing."""
    for key in keys:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A measured success rate, 0 to 1, with its 95% interval where one is known."""

    value: float
    n: int
    """Tries that were scored."""
    tasks: int | None
    """Tasks they were tries of, where the record says it."""
    low: float | None
    high: float | None

    @property
    def base(self) -> str:
        """What it was measured on: ``200 tasks``, or ``800 tries of 200 tasks``."""
        if self.tasks is None:
            return f"{self.n:,} tries"
        return f"{self.n:,} tasks" if self.n == self.tasks else f"{self.n:,} tries of {self.tasks:,} tasks"


def share(record: Json | None, how: str) -> Share | None:
    """What an evaluation measured ``greedy`` or ``sampled``; None where it measured nothing (n is 0)."""
    value, n = finite(dig(record, how, "success")), finite(dig(record, how, "n"))
    if value is None or not n:
        return None
    tasks = finite(dig(record, how, "tasks"))
    return Share(
        value=value,
        n=int(n),
        tasks=None if tasks is None else int(tasks),
        low=finite(dig(record, how, "low")),
        high=finite(dig(record, how, "high")),
    )


def counters(record: Json, key: str) -> Counter[str]:
    """The positive counts in the object under `key`."""
    found = _dict(record.get(key))
    return Counter({str(name): int(count) for name, value in found.items() if (count := finite(value)) and count > 0})


def read_history(path: Path) -> History:
    """Read the files of a run. Raises `ConfigError` if `path` is no folder; anything else missing is tolerated."""
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such run folder.")
    problems: list[str] = []
    config = _read_object(path / "config.json", problems, needed=True)
    summary = _read_object(path / "summary.json", problems, needed=False)
    records = _read_lines(path / "metrics.jsonl", problems)
    # A resumed run may repeat a step or an evaluation that it had not checkpointed: the newest counts.
    steps = {_step(record): record for record in records if record.get("kind") == "step" and _step(record) >= 0}
    evals = {str(record.get("name")): record for record in records if record.get("kind") == "eval"}
    return History(
        path=path,
        config=config,
        summary=summary,
        steps=tuple(steps[step] for step in sorted(steps)),
        evals=tuple(sorted(evals.values(), key=_step)),
        problems=tuple(problems),
    )


def write_atomically(path: Path, content: bytes) -> Path:
    """Write beside `path` and rename over it, so that nobody ever reads half of it. Raises `SetupError`."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise SetupError(f"{path}: cannot be written: {error.strerror}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes it private, and a report is there to be read
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise SetupError(f"{path}: cannot be written: {error.strerror}. Free some space or choose --out.") from error
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def _read_object(path: Path, problems: list[str], *, needed: bool) -> Json:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        if needed:
            problems.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read: {error}.")
        return {}
    if isinstance(found, dict):
        return found
    problems.append(f"{path.name} holds no JSON object.")
    return {}


def _read_lines(path: Path, problems: list[str]) -> list[Json]:
    """The objects of a JSONL file. A torn last line is what a kill leaves behind, so it is no problem; others are."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        problems.append(f"{path.name} is missing: no step or evaluation has been recorded.")
        return []
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error}.")
        return []
    records, broken = [], []
    for position, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            if position < len(lines):
                broken.append(position)
            continue
        if isinstance(record, dict):
            records.append(record)
    if broken:
        problems.append(f"{path.name}: {len(broken)} broken line(s) left out, the first is line {broken[0]}.")
    return records


def _step(record: Json) -> float:
    step = finite(record.get("step"))
    return -1.0 if step is None else step


def _dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
