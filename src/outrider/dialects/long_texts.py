"""Long texts of a large request, which a translation only moves from one place to another.

To read them and write them again would take the body's size twice more, or eight times where one character is beyond
the 16 bits of most. So they stay in the request's bytes, a placeholder stands for each of them in the tree that is
translated, and the translated body gets the request's own spelling of them.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec

from outrider.wire import WireRequest

LARGE = 1 << 20  # bytes of a body; smaller ones are read whole
LONG = 1 << 10  # bytes of a text
# What a translation puts where it belongs, alone or joined with others, and never looks into.
_TEXTS = frozenset({"arguments", "content", "data", "file_data", "image_url", "output", "text"})
_CONTAINERS = frozenset({"content", "output", "source"})
_DEPTH = 8  # messages, message, content, block, content of a tool's result, block, source, and one more

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode = msgspec.json.decode


class LongTexts:
    """Those of one request. Without `held`, and in a body below `LARGE`, there are none."""

    def __init__(self, request: WireRequest, *, held: bool = True) -> None:
        self._held = held and len(request.body) >= LARGE
        self._texts: list[memoryview] = []
        self._nonce = secrets.token_hex(16) if self._held else ""  # so that no agent can spell a placeholder

    def decode(self, raw: msgspec.Raw) -> Any:
        """The value of a field that holds texts. Raises as `msgspec.json.decode`."""
        return self._value(raw, _DEPTH, is_text=True) if self._held else _decode(raw)

    def restored(self, body: bytes) -> bytes:
        """A JSON body with the texts in place of their placeholders."""
        if not self._texts:
            return body
        parts: list[bytes | memoryview] = list(re.split(rb"<%b:(\d+)>" % self._nonce.encode(), body))
        parts[1::2] = [self._texts[int(number)] for number in parts[1::2]]
        return b"".join(parts)

    def _value(self, raw: msgspec.Raw, depth: int, *, is_text: bool) -> Any:
        view = memoryview(raw)
        kind = bytes(view[:1])
        if len(view) < LONG or not depth:
            return _decode(raw)
        if kind == b'"' and is_text:
            return self._placeholder(view[1:-1])
        if kind == b"{":
            return self._object(raw, depth - 1)
        if kind == b"[":
            return [self._value(item, depth - 1, is_text=False) for item in _items(raw)]
        return _decode(raw)

    def _object(self, raw: msgspec.Raw, depth: int) -> Any:
        fields = _fields(raw)
        if "is_error" in fields:
            return _decode(raw)  # whether it says so itself is looked for in its text
        return {
            name: self._value(value, depth, is_text=name in _TEXTS)
            if name in _TEXTS or name in _CONTAINERS
            else _decode(value)
            for name, value in fields.items()
        }

    def _placeholder(self, text: memoryview) -> str:
        """`text` is JSON's spelling of it: whoever cut it out has checked its escapes."""
        self._texts.append(text)
        return f"<{self._nonce}:{len(self._texts) - 1}>"
