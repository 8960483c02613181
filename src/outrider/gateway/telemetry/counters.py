"""What the gateway did, in numbers. Nothing is refused, failed or left out without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from outrider.types import Call, Fidelity, Json, Mode


class Counters:
    """Since the start of the process."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._broken: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._not_recorded: Counter[str] = Counter()
        self._continuation: Counter[str] = Counter()
        self._forced_tools: Counter[str] = Counter()
        self._redacted: Counter[str] = Counter()
        self._rewards: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._forwarded = 0
        self._unsampled = 0

    def forwarded(self) -> None:
        """A call that was passed through, with nothing kept of it."""
        self._forwarded += 1

    def unsampled(self) -> None:
        """A call of a trajectory that the sample rate leaves out; it is passed through."""
        self._unsampled += 1

    def redacted(self, hits: Counter[str]) -> None:
        """Parts of calls that were taken out before they were stored."""
        self._redacted += hits

    def rewarded(self, name: str, source: str) -> None:
        """A reward or feedback that came over HTTP. Names beyond the first hundred are counted together."""
        _count(self._rewards, f"{source} {name}")

    def left_out(self, notes: Iterable[str]) -> None:
        """What of a translated request had no counterpart upstream, as for `rewarded`."""
        for note in notes:
            _count(self._left_out, note[:100])

    def recorded(self, call: Call, mode: Mode) -> None:
        self._calls[f"{call.dialect} {mode} {call.state} {call.fidelity}"] += 1
        if call.continuation.startswith("engine"):
            self._continuation[call.continuation] += 1
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

    def forced_tools(self, *, made: bool) -> None:
        """A tool call that an agent forced and that was sampled freely: the model made it or said something else."""
        self._forced_tools["made" if made else "not made"] += 1

    def snapshot(self) -> Json:
        return {
            "forwarded": self._forwarded,
            "unsampled": self._unsampled,
            "calls": dict(self._calls),
            "broken": dict(self._broken),
            "refused": dict(self._refused),
            "not_recorded": dict(self._not_recorded),
            "continuation": dict(self._continuation),
            "forced_tools": dict(self._forced_tools),
            "redacted": dict(self._redacted),
            "rewards": dict(self._rewards),
            "left_out": dict(self._left_out),
        }


def _count(counter: Counter[str], key: str) -> None:
    """Under its own name, unless agents made up a hundred of them."""
    counter[key if key in counter or len(counter) < 100 else "others"] += 1
