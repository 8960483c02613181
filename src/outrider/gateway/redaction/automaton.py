"""Many expressions looked for at once in bytes, by Hyperscan (Vectorscan): all are one automaton, run once.

X. Wang et al., Hyperscan: A Fast Multi-pattern Regex Matcher for Modern CPUs, NSDI 2019.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import hyperscan

MOST = 256  # finds, after which a scan gives up


class Automaton:
    """Safe to share between threads."""

    def __init__(self, expressions: Mapping[int, bytes], counted: frozenset[int]) -> None:
        """Expressions in PCRE's syntax by their numbers. Those not in `counted` are told once, wherever they are, and
        perhaps where they are not. Raises `ValueError` where one cannot be taken, `ImportError` without Hyperscan."""
        import hyperscan  # where it is missing, calls are looked through all the same, but slower

        once = hyperscan.HS_FLAG_PREFILTER | hyperscan.HS_FLAG_SINGLEMATCH
        self._error = hyperscan.error
        self._database = hyperscan.Database()
        self._local = threading.local()
        try:
            self._database.compile(
                expressions=list(expressions.values()),
                ids=list(expressions),
                elements=len(expressions),
                flags=[0 if number in counted else once for number in expressions],
            )
        except hyperscan.error as error:
            raise ValueError(str(error)) from None

    def found(self, data: bytes) -> list[int] | None:
        """The numbers of the expressions that are in `data`; None where they are too many."""
        found: list[int] = []
        try:
            self._database.scan(data, _note, context=found, scratch=self._scratch())
        except self._error:
            return None
        return found

    def _scratch(self) -> hyperscan.Scratch:
        """Room to work in; each thread needs its own."""
        try:
            scratch: hyperscan.Scratch = self._local.scratch
        except AttributeError:
            scratch = self._local.scratch = self._database.scratch.clone()
        return scratch


def _note(number: int, start: int, end: int, flags: int, found: object) -> bool:
    assert isinstance(found, list)
    found.append(number)
    return len(found) > MOST
