"""Installs harnesses, each into a folder of its own that later runs find again."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harnesses.catalog import Harness, Installer

INSTALL_TIMEOUT_S = 1200
STAMP = "installed.json"


class InstallError(Exception):
    """A harness could not be installed; the message ends with the installer's own last words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    root: Path
    bin: Path
    seconds: float
    """What the install took, whenever it was."""
    bytes: int

    @property
    def python(self) -> Path:
        return self.bin / "python"


def cache_root() -> Path:
    """``$OUTRIDER_CACHE/harnesses``, by default ``~/.cache/outrider/harnesses``."""
    return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider") / "harnesses"


def install(harness: Harness) -> Installed:
    """The installed harness, from the cache where it is there whole. Raises `InstallError`."""
    root = cache_root() / harness.name
    with locked(root):
        found = _stamp(root)
        if found is None or found["requirements"] != list(harness.requirements):
            found = _install_anew(harness, root)
    bin = root / ("bin" if harness.installer is Installer.PIP else "node_modules/.bin")
    return Installed(root=root, bin=bin, seconds=found["seconds"], bytes=found["bytes"])


def is_cached(harness: Harness) -> bool:
    found = _stamp(cache_root() / harness.name)
    return found is not None and found["requirements"] == list(harness.requirements)


def _install_anew(harness: Harness, root: Path) -> dict[str, Any]:
    shutil.rmtree(root, ignore_errors=True)
    started = time.monotonic()
    if harness.installer is Installer.PIP:
        _run([_interpreter(harness.python), "-m", "venv", str(root)])
        pip = [str(root / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *harness.requirements])
    else:
        root.mkdir(parents=True)
        (root / "package.json").write_text('{"private": true}\n')
        _run(["npm", "install", "--prefix", str(root), "--no-audit", "--no-fund", *harness.requirements])
    found = {
        "requirements": list(harness.requirements),
        "seconds": round(time.monotonic() - started, 1),
        "bytes": sum(file.lstat().st_size for file in root.rglob("*") if not file.is_dir()),
    }
    (root / STAMP).write_text(json.dumps(found))  # last, so that half an install is never taken for a whole one
    return found


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=INSTALL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise InstallError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _interpreter(oldest: tuple[int, int]) -> str:
    """This Python if it is new enough, else a newer one on PATH or under pyenv. Raises `InstallError`."""
    if sys.version_info >= oldest:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(oldest[1], oldest[1] + 4)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    known = sorted(pyenv.glob("3.*/bin/python3"), key=_release)
    newer = [str(path) for path in known if _release(path)[:2] >= oldest]
    for candidate in [*filter(None, map(shutil.which, names)), *newer]:
        # pyenv puts stand-ins on PATH for versions that are not switched on: only a start tells.
        if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise InstallError(f"Python {oldest[0]}.{oldest[1]} or newer is needed; tried {', '.join(names)} and {pyenv}.")


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.parts[-3]))


def _stamp(root: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((root / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return found


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """One installer at a time, also across processes."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
