"""Whether a JSON text holds more than the tree that was read of it: under one name only the last value is there.

Counting strings, names and values alike, tells it at the cost of a look through the bytes.
"""

from __future__ import annotations

from typing import Any


def strings_in(body: bytes) -> int:
    """How many strings a JSON text holds, names and values."""
    body = body.replace(b"\\\\", b"")  # an escaped backslash escapes no quote
    return (body.count(b'"') - body.count(b'\\"')) // 2


def strings_of(tree: Any) -> int:
    count = 0
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            count += 1
        elif isinstance(one, dict):
            count += len(one)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return count
