"""Server-sent events as bytes: cut a stream into events without changing one byte of it."""

from __future__ import annotations

import re
from codecs import BOM_UTF8

from outrider.wire import Event

# Lines end with \n, \r\n or \r and with nothing else (no U+2028, no form feed). An empty line ends an event.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_OVERLAP = 3  # one byte less than the longest blank line
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventSplitter:
    """Feed it bytes as they come; it gives the events that are whole. Their `raw` parts joined are what was fed.

    A network read may end anywhere, also inside a UTF-8 sequence or between \\r and \\n.
    """

    def __init__(self) -> None:
        self._held: list[bytes] = []  # an event that has not ended; joined only when it has
        self._tail = b""  # the last bytes of `_held`, where a blank line may have begun
        self._begun = False

    def feed(self, data: bytes) -> list[Event]:
        fresh = self._tail + data
        plain = b"\r" not in fresh
        if not _end_of_event(fresh, 0, plain):
            self._held.append(data)
            self._tail = fresh[-_OVERLAP:]
            return []
        buffer = b"".join((*self._held, data)) if self._held else data
        look = len(buffer) - len(fresh)
        events = []
        start = 0
        while end := _end_of_event(buffer, max(start, look), plain):
            events.append(parse_event(buffer[start:end]))
            start = end
        rest = buffer[start:]
        self._held = [rest] if rest else []
        self._tail = rest[-_OVERLAP:]
        return self._without_mark(events)

    def end(self) -> list[Event]:
        """What is left when the stream ends without a blank line."""
        rest = b"".join(self._held)
        self._held.clear()
        self._tail = b""
        return self._without_mark([parse_event(rest)] if rest else [])

    def _without_mark(self, events: list[Event]) -> list[Event]:
        """A stream may begin with a byte order mark, which is no part of its first line."""
        if events and not self._begun:
            self._begun = True
            if events[0].raw.startswith(BOM_UTF8):
                events[0] = parse_event(events[0].raw.removeprefix(BOM_UTF8))._replace(raw=events[0].raw)
        return events


def _end_of_event(buffer: bytes, look: int, plain: bool) -> int:
    """Where the first event from `look` on ends, its blank line included; 0 if it does not end here."""
    if plain:
        found = buffer.find(b"\n\n", look)
        return found + 2 if found >= 0 else 0
    match = _BLANK_LINE.search(buffer, look)
    return match.end() if match else 0


def parse_event(raw: bytes) -> Event:
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return Event(raw, raw[6:-2])
    data: list[bytes] = []
    name = b""
    for line in _LINE_END.split(raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return Event(raw, b"\n".join(data), name)
