"""Which patterns a text may hold, told for all of them in one pass over its bytes.

A scan takes a hundredth of the time that Python's expressions take one after the other. What it finds is a superset: a
pattern that it doesn't find is not there, one that it finds is looked for by its own expression. A body of JSON in
which it finds nothing has not even to be taken apart.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

from outrider.gateway.redaction.automaton import Automaton
from outrider.gateway.redaction.patterns import Pattern

# An item of a list that tells its place may be a piece of a text that goes on in other items of the same place. Not so
# the first item where it tells place 0: items that tell none are at 1, 2 and so on.
_PLACE = rb'"index"'
_FIRST_PLACE = rb'\[[ \t\r\n]*\{[ \t\r\n]*"index"[ \t\r\n]*:[ \t\r\n]*0[ \t\r\n]*[,}]'
# What encoders of JSON write as it is; where one does not, `HIDDEN` is found.
_AS_IT_IS = re.compile(r"""[^"\\/&'<>\x00-\x1f\x7f-\U0010ffff]+""")


class Scan:
    """Safe to share between threads. Where Hyperscan isn't, or knows the processor not, anything may be anywhere;
    nor is anything scanned under a Python that `superset` can't be had for."""

    def __init__(self, patterns: Sequence[Pattern], *, fast: bool = True) -> None:
        """Without `fast` nothing is scanned."""
        self._patterns = patterns
        self._place, self._first_place, hidden = range(len(patterns), len(patterns) + 3)
        self._automaton: Automaton | None = None
        scanned: frozenset[int] = frozenset()
        if fast:
            with contextlib.suppress(ImportError):
                expressions, spelled = _expressions(patterns)
                extra = {self._place: _PLACE, self._first_place: _FIRST_PLACE, hidden: spelled}
                self._automaton, scanned = _automaton(expressions, extra)
        self._unscanned = frozenset(range(len(patterns))) - scanned
        """Patterns that nothing can be scanned for."""

    def clean(self, body: bytes, credentials: Sequence[str]) -> bool:
        """True where no text in `body`, as JSON or as it stands, can hold a pattern or one of `credentials`."""
        if self._automaton is None or self._unscanned or any(_may_hold(body, one) for one in credentials):
            return False
        found = self._automaton.found(body)
        if not found:
            return found is not None
        places = found.count(self._place)
        return found.count(self._first_place) == places and len(found) == 2 * places

    def patterns(self, text: str) -> list[Pattern]:
        """Those that `text` may hold."""
        found = None if self._automaton is None else self._automaton.found(text.encode("utf-8", "surrogatepass"))
        candidates = self._patterns
        if found is not None:
            numbers = sorted(self._unscanned.union(found))
            candidates = [self._patterns[number] for number in numbers if number < len(self._patterns)]
        return [one for one in candidates if not one.words or any(word in text for word in one.words)]


def _expressions(patterns: Sequence[Pattern]) -> tuple[dict[int, bytes], bytes]:
    """Of each pattern by its number what to scan for; those are left out for which there is nothing. And what hides
    them all. Raises `ImportError`."""
    from outrider.gateway.redaction.superset import HIDDEN, superset  # it stands on what is Python's own

    found: dict[int, bytes] = {}
    for number, pattern in enumerate(patterns):
        with contextlib.suppress(ValueError):
            words = b"|".join(re.escape(word).encode() for word in pattern.words)
            found[number] = words if pattern.by_words else superset(pattern.regex)
    return found, HIDDEN


def _automaton(expressions: Mapping[int, bytes], extra: Mapping[int, bytes]) -> tuple[Automaton | None, frozenset[int]]:
    """One for all of them that it can take, and which of `expressions` these are. Raises `ImportError`."""
    counted = frozenset(extra)
    try:
        return Automaton({**expressions, **extra}, counted), frozenset(expressions)
    except ValueError:
        alone = {number: expression for number, expression in expressions.items() if _can_be_taken(expression)}
        if len(alone) == len(expressions):  # the processor is not known, or together they are too much
            return None, frozenset()
        return _automaton(alone, extra)


def _can_be_taken(expression: bytes) -> bool:
    try:
        Automaton({0: expression}, frozenset())
    except ValueError:
        return False
    return True


def _may_hold(body: bytes, credential: str) -> bool:
    part = max(_AS_IT_IS.findall(credential), key=len, default="")
    return part.encode() in body
