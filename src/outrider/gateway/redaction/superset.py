"""From a pattern for texts to one for the bytes that they are written in.

A text of a JSON body is found in it without taking the body apart: the expression matches, at least, wherever the text
in which the pattern is found stands as it is (in UTF-8 or Latin-1), or between the quotes of a JSON string, with its
escapes. What only looks around (``\\b``, lookaheads) is left out. Two spellings are not followed: a text in several
strings, and the escapes that `HIDDEN` finds, which hardly an encoder writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# Private, but the only parser of Python's expressions there is, and as it is since Python 3.11. Where it isn't any
# more, this module can't be imported, and calls are looked through all the same, but slower.
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

HIDDEN = rb"\\u00(?:2[0-589a-fA-F]|3[0-9abdfABDF]|[4-7])"
"""An ASCII character that is spelled by its number. Left out are those that encoders write so for the sake of HTML."""

_ASCII = [chr(code) for code in range(128)]
_FOLDED = "\u0130\u0131\u017f\u212a"  # all that is no ASCII and equals an ASCII letter where case is ignored
_WRITTEN = {
    '"': r'\\"',
    "\\": r"\\\\",
    "/": r"\\/",
    "\b": r"\\b",
    "\f": r"\\f",
    "\n": r"\\n",
    "\r": r"\\r",
    "\t": r"\\t",
    "&": r"\\u0026",
    "'": r"\\u0027",
    "<": r"\\u003[cC]",
    ">": r"\\u003[eE]",
}
"""How JSON writes a character, if not as it is."""
_BY_NUMBER = r"\\u[0-9a-fA-F]{4}"
_BEYOND = r"\x80-\xff"

_CHARACTERS = frozenset(
    {_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN, _constants.CATEGORY}
)
_REPEATS = frozenset({_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT})
_WITHOUT_WIDTH = frozenset({_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT})

_Node = tuple[Any, Any]


def superset(pattern: re.Pattern[str]) -> bytes:
    """In the syntax of PCRE, for bytes. Raises `ValueError` for a construct that isn't known here."""
    try:
        return _sequence(_parser.parse(pattern.pattern, pattern.flags), pattern.flags).encode("ascii")
    except (AttributeError, TypeError) as error:
        raise ValueError(f"this Python's parser is another one: {error}") from error


def _sequence(nodes: Iterable[_Node], flags: int) -> str:
    return "".join(_node(node, flags) for node in nodes)


def _node(node: _Node, flags: int) -> str:
    kind, value = node
    if kind in _CHARACTERS:
        return _times(node, 1, 1, flags)
    if kind in _REPEATS:
        low, high, body = value
        if len(body) == 1 and body[0][0] in _CHARACTERS:
            return _times(body[0], low, high, flags)
        return f"(?:{_sequence(body, flags)}){_count(low, high)}"
    if kind in _WITHOUT_WIDTH:
        return ""
    if kind is _constants.SUBPATTERN:
        _, added, removed, body = value
        return f"(?:{_sequence(body, (flags | added) & ~removed)})"
    if kind is _constants.ATOMIC_GROUP:
        return f"(?:{_sequence(value, flags)})"
    if kind is _constants.BRANCH:
        return _either([_sequence(branch, flags) for branch in value[1]])
    if kind is _constants.GROUPREF:
        return r"[\x00-\xff]*"
    if kind is _constants.GROUPREF_EXISTS:
        _, then, otherwise = value
        return _either([_sequence(then, flags), _sequence(otherwise or (), flags)])
    raise ValueError(f"{kind} is not known")


def _either(branches: Sequence[str]) -> str:
    return f"(?:{'|'.join(branches)})"


def _count(low: int, high: int) -> str:
    return f"{{{low},{'' if high is _constants.MAXREPEAT else high}}}"


def _times(node: _Node, low: int, high: int, flags: int) -> str:
    """A set of characters, between `low` and `high` of them."""
    single = _compiler.compile(_parser.SubPattern(_parser.State(), [node]), flags)
    members = [character for character in _ASCII if single.match(character)]
    beyond = _goes_beyond(node, flags) or single.search(_FOLDED) is not None
    written = [_WRITTEN[character] for character in members if character in _WRITTEN]
    if beyond or any(character < " " for character in members):
        written.append(_BY_NUMBER)
    plain = "".join(f"\\x{ord(character):02x}" for character in members) + _BEYOND * beyond
    unit = _either([*([f"[{plain}]"] if plain else ()), *written])
    if beyond:  # one character may be several bytes, and two escapes
        return f"{unit}{{{low},}}"
    return unit if low == high == 1 else unit + _count(low, high)


def _goes_beyond(node: _Node, flags: int) -> bool:
    """Whether a set may have members beyond ASCII, apart from those of `_FOLDED`."""
    kind, value = node
    if kind is _constants.LITERAL:
        return bool(value > 127)
    if kind is _constants.RANGE:
        return bool(value[1] > 127)
    if kind is _constants.IN:
        return any(_goes_beyond(item, flags) for item in value)
    if kind is _constants.CATEGORY and flags & re.ASCII:
        return "NOT" in str(value)
    return True
