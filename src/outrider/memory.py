"""Peak memory of a process and everything it started."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil


def tree_bytes(process: psutil.Process) -> int:
    """Memory of `process` and its descendants now, in bytes.

    Proportional set size where the kernel tells it, since forked harnesses share most of their pages and a sum of
    resident sizes would count those once for each.
    """
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += _pss(member.pid) or member.memory_info().rss
        except psutil.Error:
            continue  # it ended while we looked
    return total


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class MemoryWatch:
    """Samples the tree of this process from a thread, every `period_s` seconds."""

    def __init__(self, period_s: float = 1.0, floor: int = 0) -> None:
        self.peak = floor
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        me = psutil.Process()
        while True:
            try:
                self.peak = max(self.peak, tree_bytes(me))
            except psutil.Error:
                pass
            if self._stop.wait(self._period_s):
                return
