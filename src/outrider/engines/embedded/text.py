"""From token ids to text, one token at a time: whole characters only, stop strings held back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Text of one sampled sequence.

    Bytes of a character that is split over tokens wait for the rest of it; what is left incomplete at the end is
    dropped. Text that may turn out to be the beginning of a stop string waits too. Joined, the pieces are the text.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found. Nothing may be pushed after it."""

    def push(self, data: bytes) -> str:
        """Take one token's bytes; return the text that is certain now."""
        self._held += self._decoder.decode(data)
        if not self._stop:
            text, self._held = self._held, ""
            return text
        # A match found now ends in the newest bytes; the one that begins first wins, the longer where two do.
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, _, self.matched = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """The text still held back, once no more tokens come."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
