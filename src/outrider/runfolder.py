"""The run folder: what a run leaves behind, and what it needs to go on after a crash.

A step is finished when its checkpoint stands under its final name. Everything else (metrics lines, published weights,
working folders) is written so that it can be thrown away and made again from there.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from outrider.config import RunConfig, parse
from outrider.errors import ConfigError
from outrider.keys import split_password
from outrider.types import Json

FREE_KEYS = ("out", "train.steps", "train.keep_checkpoints", "eval", "executor", "engine", "gateway", "store")
"""Keys that may differ when a run goes on: they change how far or where it runs, not what it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A finished step."""

    path: Path
    step: int
    policy_version: int
    weights: Path
    """Published weights of `policy_version`."""
    position: Json
    """Where the scheduler stood."""


class RunFolder:
    """Paths, lock and files of one run. Use as a context manager: the lock keeps a second trainer out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.metrics_file = root / "metrics.jsonl"
        self.store_file = root / "store.sqlite3"
        self.weights = root / "weights"
        self.best_weights = root / "best"
        self.checkpoints = root / "checkpoints"
        self.logs = root / "logs"
        self.work = root / "work"
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        for folder in (self.root, self.weights, self.checkpoints, self.logs, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip()
            self._lock.close()
            raise ConfigError(
                f"out: {self.root} is in use by process {owner}. Stop it, or choose another -o out=DIR."
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def adopt(self, config: RunConfig) -> None:
        """Write the configuration, or check that the run which lies here has the same. Raises `ConfigError`.

        The password of a store is not written: many may read a run folder, and each start brings it along anew.
        """
        file = self.root / "config.json"
        tree = msgspec.to_builtins(config)
        tree["store"]["url"], _ = split_password(config.store.url)
        text = json.dumps(tree, indent=2, ensure_ascii=False)
        old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        if old is not None and self._has_begun(old):
            differing = sorted(_differing(_completed(old), json.loads(text), ""))
            if differing:
                raise ConfigError(
                    f"out: {self.root} holds a run with other values of {', '.join(differing)}. "
                    "Give the same values to resume it, or choose another -o out=DIR."
                )
        write_atomically(file, text)

    def _has_begun(self, config: Json) -> bool:
        """Whether anything was done under `config`. What failed before that may be mended and tried again."""
        return self.store_file.exists() or bool(config.get("store", {}).get("url")) or bool(self.records())

    # -- metrics ---------------------------------------------------------------------------------------------------

    def records(self) -> list[Json]:
        """Every whole line of metrics.jsonl; a line torn by a crash is left out."""
        try:
            lines = self.metrics_file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines[:-1] if line.strip()]

    def append(self, record: Json) -> None:
        """Add a line, durably. A number that is not finite, such as the loss of a skipped update, becomes null."""
        line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget_after(self, step: int) -> None:
        """Drop records of steps whose checkpoint was never finished."""
        kept = [record for record in self.records() if record["step"] <= step]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        write_atomically(self.metrics_file, text)

    def evaluation(self, name: str) -> Json | None:
        """The record of a finished evaluation."""
        found = [record for record in self.records() if record["kind"] == "eval" and record["name"] == name]
        return found[-1] if found else None

    # -- checkpoints and weights -------------------------------------------------------------------------------------

    def weights_dir(self, version: int) -> Path:
        return self.weights / f"v{version:04d}"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:04d}"

    def finish_step(self, step: int, policy_version: int, weights: Path, position: Json) -> None:
        """Declare the checkpoint in `checkpoint_dir(step)` complete."""
        facts = {
            "step": step,
            "policy_version": policy_version,
            "weights": str(weights.relative_to(self.root)),
            "position": position,
        }
        write_atomically(self.checkpoint_dir(step) / "step.json", json.dumps(facts))

    def latest(self) -> Checkpoint | None:
        """The last finished step."""
        finished = self._finished()
        if not finished:
            return None
        facts: dict[str, Any] = json.loads((finished[-1] / "step.json").read_text(encoding="utf-8"))
        return Checkpoint(
            path=finished[-1],
            step=facts["step"],
            policy_version=facts["policy_version"],
            weights=self.root / facts["weights"],
            position=facts["position"],
        )

    def _finished(self) -> list[Path]:
        """Finished checkpoints in order of their steps, which from step 10,000 on is not that of their names."""
        finished = [path for path in self.checkpoints.glob("step-*") if (path / "step.json").exists()]
        return sorted(finished, key=lambda path: int(path.name.removeprefix("step-")))

    def prune(self, keep: int) -> None:
        """Keep the last `keep` finished checkpoints and the weights they need; drop what a crash left half done."""
        finished = self._finished()
        for path in finished[:-keep]:
            shutil.rmtree(path)
        needed = {json.loads((path / "step.json").read_text())["policy_version"] for path in finished[-keep:]}
        oldest = min(needed, default=0)
        for path in self.weights.glob("v[0-9]*"):
            if int(path.name[1:]) < oldest:
                shutil.rmtree(path)

    # -- the best weights ------------------------------------------------------------------------------------------

    def keep_best(self, weights: Path, facts: Json) -> None:
        """Make `best` a copy of the folder `weights`, with `facts` in its ``best.json``.

        Files are linked where the file system can, so that a copy takes no room; whatever is killed meanwhile, one
        whole version stays. Pruning leaves it alone.
        """
        new, old = self.root / "best.new", self.root / "best.old"
        self.best()  # finishes what a crash has interrupted
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(weights, new, copy_function=_link_or_copy)
        write_atomically(new / "best.json", json.dumps(facts))
        if self.best_weights.exists():
            self.best_weights.rename(old)
        new.rename(self.best_weights)
        shutil.rmtree(old, ignore_errors=True)

    def best(self) -> Json | None:
        """The facts of the best weights, if any were kept."""
        old = self.root / "best.old"
        if old.exists() and not self.best_weights.exists():
            old.rename(self.best_weights)
        shutil.rmtree(old, ignore_errors=True)
        file = self.best_weights / "best.json"
        if not file.exists():
            return None
        facts: Json = json.loads(file.read_text(encoding="utf-8"))
        return facts


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
    return target


def write_atomically(file: Path, text: str) -> None:
    """Replace `file` as a whole, durably."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _completed(old: Json) -> Json:
    """A configuration that an older Outrider wrote, with the defaults of keys that it did not know."""
    try:
        completed: Json = json.loads(json.dumps(msgspec.to_builtins(parse(old))))
    except ConfigError:  # a key that is no more; the comparison names it
        return old
    return completed


def _differing(old: Any, new: Any, where: str) -> list[str]:
    if where.rstrip(".") in FREE_KEYS:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [path for key in keys for path in _differing(old.get(key), new.get(key), f"{where}{key}.")]
    return [] if old == new else [where.rstrip(".")]
