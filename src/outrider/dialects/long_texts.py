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

from outrider.jsontext import LongTextsApart
from outrider.wire import WireRequest

LARGE = 1 << 20  # bytes of a body; smaller ones are read whole
# What a translation puts where it belongs, alone or joined with others, and never looks into.
_TEXTS = frozenset({"arguments", "content", "data", "file_data", "image_url", "output", "text"})
_CONTAINERS = frozenset({"content", "output", "source"})
_WHOLE = frozenset({"is_error"})  # whether a result says so itself is looked for in its text


class LongTexts:
    """Those of one request. Without `held`, and in a body below `LARGE`, there are none."""

    def __init__(self, request: WireRequest, *, held: bool = True) -> None:
        self._held = held and len(request.body) >= LARGE
        self._texts: list[memoryview] = []
        self._nonce = secrets.token_hex(16) if self._held else ""  # so that no agent can spell a placeholder

    def decode(self, raw: msgspec.Raw) -> Any:
        """The value of a field that holds texts. Raises as `msgspec.json.decode`."""
        if not self._held:
            return msgspec.json.decode(raw)
        return LongTextsApart(self._placeholder, texts=_TEXTS, containers=_CONTAINERS, whole=_WHOLE).decode(raw)

    def restored(self, body: bytes) -> bytes:
        """A JSON body with the texts in place of their placeholders."""
        if not self._texts:
            return body
        parts: list[bytes | memoryview] = list(re.split(rb"<%b:(\d+)>" % self._nonce.encode(), body))
        parts[1::2] = [self._texts[int(number)] for number in parts[1::2]]
        return b"".join(parts)

    def _placeholder(self, text: memoryview) -> str:
        self._texts.append(text)
        return f"<{self._nonce}:{len(self._texts) - 1}>"
