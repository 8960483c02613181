"""How many CPU threads a step uses.

The threads of one operation wait for each other, some 500 times a step. While another process holds the core of one
of them, all are as slow as that one, and a single thread on a free core is faster than two. The results are the same
for any number, so it may change between steps.
"""

from __future__ import annotations

import time

import torch

WINDOW_S = 0.4
"""Time in steps after which the present number is judged."""
BUSY_SHARE = 0.6
"""This thread runs for less of a step than that when it waits for another that has no core: then fewer are faster.
With two threads the break-even is at one half."""
REST_S = (2.0, 30.0)
"""Shortest and longest time before more threads are tried again. Each try that fails doubles it."""


class Threads:
    """Between `least` and `most`: halved while threads wait for cores, doubled again when they no longer do."""

    def __init__(self, *, most: int, least: int = 1) -> None:
        self._most, self._least = most, least
        self.count = most
        self._wall_s = self._busy_s = 0.0
        self._rest_s = REST_S[0]
        self._retry_at = 0.0

    def start(self) -> tuple[float, float]:
        """Before a step, on the thread that computes it; returns what `stop` takes."""
        torch.set_num_threads(self.count)
        return time.monotonic(), time.thread_time()

    def stop(self, started: tuple[float, float]) -> None:
        """After the step."""
        now = time.monotonic()
        self.judge(now, now - started[0], time.thread_time() - started[1])

    def judge(self, now: float, wall_s: float, busy_s: float) -> None:
        """Take a step's duration and the time that its main thread ran in it, and choose the next number."""
        self._wall_s += wall_s
        self._busy_s += busy_s
        if self._wall_s < WINDOW_S:
            return
        share = self._busy_s / self._wall_s
        self._wall_s = self._busy_s = 0.0
        if self.count > self._least and share < BUSY_SHARE:
            self.count = max(self.count // 2, self._least)
            self._retry_at = now + self._rest_s
            self._rest_s = min(2 * self._rest_s, REST_S[1])
        elif self.count == self._most:
            self._rest_s = REST_S[0]
        if self.count < self._most and now >= self._retry_at:
            self.count = min(2 * self.count, self._most)
