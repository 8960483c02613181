"""Whether bytes are UTF-8, without their text: one character beyond 16 bits makes it four times as long."""

from __future__ import annotations

import codecs

SLICE = 1 << 20


def check_utf8(data: bytes) -> None:
    """Raises `UnicodeDecodeError`, whose ``start`` counts from the beginning of `data`."""
    if data.isascii():
        return
    view, at = memoryview(data), 0
    while at < len(data):
        try:
            _, used = codecs.utf_8_decode(view[at : at + SLICE], "strict", at + SLICE >= len(data))
        except UnicodeDecodeError as error:
            error.start += at
            raise
        at += used
