"""What the gateway did, in numbers. Nothing is refused, failed or left out without one."""

from __future__ import annotations

from collections import Counter

from outrider.types import Call, Fidelity, Json, Mode


class Counters:
    """Since the start of the process."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._not_recorded: Counter[str] = Counter()
        self._continuation: Counter[str] = Counter()
        self._forwarded = 0

    def forwarded(self) -> None:
        """A call that was passed through, with nothing kept of it."""
        self._forwarded += 1

    def recorded(self, call: Call, mode: Mode) -> None:
        self._calls[f"{call.dialect} {mode} {call.state} {call.fidelity}"] += 1
        if call.fidelity is Fidelity.BROKEN:
            self._broken[call.fidelity_reason.partition(":")[0]] += 1

    def refused(self, code: str) -> None:
        """A call that never went upstream."""
        self._refused[code] += 1

    def not_recorded(self, kind: str) -> None:
        """A call that was made, could not be stored, and so was not answered as if it had been."""
        self._not_recorded[kind] += 1

    def continuation(self, outcome: str) -> None:
        """How a call's prompt came about (see `continuation.turns`)."""
        self._continuation[outcome] += 1

    def snapshot(self) -> Json:
        return {
            "forwarded": self._forwarded,
            "calls": dict(self._calls),
            "broken": dict(self._broken),
            "refused": dict(self._refused),
            "not_recorded": dict(self._not_recorded),
            "continuation": dict(self._continuation),
        }
