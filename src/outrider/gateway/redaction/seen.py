"""Texts in which nothing was found: an agent sends its whole conversation again with every call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

SEEN = 16_384
SHORT = 64  # characters; to look through fewer costs no more than to remember them


class Seen:
    """Texts in which nothing was found: an agent sends its whole conversation again with every call.

    They are known by a hash, the last `SEEN` of them at least. Safe to share between threads.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def clean(self, text: str) -> bool:
        if len(text) < SHORT:
            return False
        digest = _digest(text)
        return digest in self._young or digest in self._old

    def add(self, texts: Iterable[str]) -> None:
        self._young.update(_digest(text) for text in texts if len(text) >= SHORT)
        if len(self._young) >= SEEN:
            self._old, self._young = self._young, set()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
