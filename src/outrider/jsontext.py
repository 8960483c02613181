"""JSON text without all of its tree: members cut out where they stand, and long texts left where they are.

To cut a member out costs a fraction of parsing it and writing it again. Only what is certain is cut: a caller says
which values a name has, and a text in which the name stands more often, or elsewhere, is left to slower ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

Spans = list[tuple[int, int, bytes]]
"""From where to where in the text, and what stands there instead; in no order."""

LONG_TEXT = 1 << 10  # bytes
_DEPTH = 8  # messages, message, content, block, content of a tool's result, block, source, and one more
_decode = msgspec.json.decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_OBJECT = re.compile(rb"\{")
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")


def value_spans(data: bytes, name: bytes, values: Iterable[msgspec.Raw], new: bytes) -> Spans | None:
    """Those of `values`, in the order of the text, with `new` for each; the empty ones aren't there.

    `name` has its quotes. None unless it stands exactly before these values and nowhere else.
    """
    spans: Spans = []
    at = data.find(name)
    for value in filter(None, map(bytes, values)):
        colon = _COLON.match(data, at + len(name)) if at >= 0 else None
        if colon is None or not data.startswith(value, colon.end()) or data[at - 1 : at] == b"\\":
            return None
        if value != new:
            spans.append((colon.end(), colon.end() + len(value), new))
        at = data.find(name, colon.end() + len(value))
    return spans if at < 0 else None


def replaced(data: bytes, spans: Spans) -> bytes:
    """The same object where there are none."""
    if not spans:
        return data
    parts: list[bytes] = []
    position = 0
    for start, end, new in sorted(spans):
        parts += (data[position:start], new)
        position = end
    parts.append(data[position:])
    return b"".join(parts)


class LongTextsApart:
    """Decodes JSON with something short in place of long texts, so that no copy of them is made. One character
    beyond 16 bits makes a copy four times as long."""

    def __init__(
        self,
        put: Callable[[memoryview], str],
        *,
        texts: frozenset[str],
        containers: frozenset[str],
        whole: frozenset[str] = frozenset(),
    ) -> None:
        """`put` gets a text of at least `LONG_TEXT` bytes as it is spelled, without its quotes; its escapes are valid.

        These are the values of the names `texts`, in the outermost value and, inside it, in lists and under the names
        `containers`. An object with a name of `whole` is decoded as it is.
        """
        self._put = put
        self._texts = texts
        self._containers = containers
        self._whole = whole

    def decode(self, raw: msgspec.Raw) -> Any:
        """Raises as `msgspec.json.decode`."""
        return self._value(raw, _DEPTH, is_text=True, is_container=True)

    def _value(self, raw: msgspec.Raw, depth: int, *, is_text: bool, is_container: bool) -> Any:
        view = memoryview(raw)
        if len(view) < LONG_TEXT or not depth:
            return _decode(raw)
        kind = bytes(view[:1])
        if kind == b'"' and is_text:
            return self._put(view[1:-1])
        if kind == b"{" and is_container:
            return self._object(raw, depth - 1)
        if kind == b"[" and is_container and _OBJECT.search(view):  # not one of millions of numbers
            return [self._value(item, depth - 1, is_text=False, is_container=True) for item in _items(raw)]
        return _decode(raw)

    def _object(self, raw: msgspec.Raw, depth: int) -> Any:
        members = _members(raw)
        if not self._whole.isdisjoint(members):
            return _decode(raw)
        return {
            name: self._value(value, depth, is_text=name in self._texts, is_container=name in self._containers)
            for name, value in members.items()
        }


def text_pieces(spelled: memoryview, size: int) -> Iterator[str]:
    """The text that JSON spells so, mostly `size` bytes of it at a time."""
    at = 0
    while at < len(spelled):
        end = at + size
        if end < len(spelled):
            end = _cut(bytes(spelled[at:end]), at, len(spelled))
        yield _decode(b"".join((b'"', spelled[at:end], b'"')))
        at = end


def _cut(piece: bytes, at: int, end: int) -> int:
    """Where a piece that begins `at` may end, at `end` at the latest: neither in an escape nor in a character."""
    space = piece.rfind(b" ")
    if space > 0:
        return at + space
    return at + len(piece) if piece.isascii() and b"\\" not in piece else end
