"""The tokenizer of a model folder, for prompts: text to ids where markers in people's text stay text, and back.

A chat template writes control tokens by spelling them. So a tool result that spells ``<|im_end|>`` would end the turn,
were the rendered text simply encoded. `TokenText.guard` breaks such spellings with a noncharacter before the template
sees them, and `TokenText.encode` takes it out again behind the back of the added tokens: what was guarded becomes
ordinary pieces, what the template itself wrote becomes control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.errors import ConfigError

# Unicode keeps U+FDD0 out of text that is exchanged, and no template strips or escapes it.
BREAK = "\ufdd0"
_REPLACEMENT = "\ufffd"


class TokenText:
    """Thread-safe: nothing changes after the start."""

    def __init__(self, folder: Path, *, template: str = "") -> None:
        """`template` tells which added tokens it uses as markers. Raises `ConfigError`."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"tokenizer: {str(folder)!r} has no tokenizer.json, which is needed to render prompts.")
        try:
            self._full = Tokenizer.from_file(str(file))
            spec = json.loads(file.read_text(encoding="utf-8"))
            self.added: dict[str, int] = {t["content"]: t["id"] for t in spec.get("added_tokens") or ()}
            self.special_ids = frozenset(t["id"] for t in spec.get("added_tokens") or () if t["special"])
            markers = [t for t in spec.get("added_tokens") or () if _is_marker(t["content"], t["special"], template)]
            left = [t for t in spec.get("added_tokens") or () if t not in markers]
            self._plain = Tokenizer.from_str(json.dumps({**spec, "added_tokens": left}))
        except ConfigError:
            raise
        except Exception as error:  # `tokenizers` raises bare exceptions
            raise ConfigError(f"tokenizer: {str(file)!r} cannot be read: {error}") from error
        for tokenizer in (self._full, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.markers = frozenset(t["id"] for t in markers)
        self._ids = {t["content"]: t["id"] for t in markers}
        self._any = _pattern(t["content"] for t in markers)
        self._control = _pattern(t["content"] for t in markers if t["special"])

    def guard(self, text: str, *, only_control: bool = False) -> str:
        """`text` with every marker's spelling broken; with `only_control` of special tokens alone."""
        if BREAK in text:
            text = text.replace(BREAK, _REPLACEMENT)
        pattern = self._control if only_control else self._any
        if pattern is None:
            return text
        # A marker may be left when another one's break joins its neighbours, so until none is found.
        while pattern.search(text):
            text = pattern.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, without tokens of the tokenizer's own at its ends."""
        if BREAK not in text or self._any is None:
            return list(self._full.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for piece in self._any.splitlist(text):
            known = self._ids.get(piece)
            if known is not None:
                ids.append(known)
            elif piece:
                ids += self._encode_plain(piece)
        return ids

    def encode_said(self, text: str) -> list[int]:
        """Ids of an assistant's words: the markers in them are its own, but for control tokens."""
        return self.encode(self.guard(text, only_control=True))

    def _encode_plain(self, guarded: str) -> list[int]:
        ids: list[int] = self._plain.encode(guarded.replace(BREAK, ""), add_special_tokens=False).ids
        if self.markers.isdisjoint(ids):
            return ids
        # A vocabulary may hold a marker as an ordinary piece too. Cut where it was broken, it can't come together.
        return [i for part in guarded.split(BREAK) for i in self._plain.encode(part, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens spelled out."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def piece(self, spelling: str, otherwise: int | None) -> int | None:
        """The id of one piece of the vocabulary."""
        found = self._full.token_to_id(spelling)
        return otherwise if found is None else int(found)

    def stream(self) -> TextStream:
        return TextStream(self._full)


class TextStream:
    """Text of sampled ids, as they come. A character that is split over tokens waits for its last byte."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""

    def restart(self) -> None:
        """What waits is dropped: a marker follows, so its other bytes never come."""
        self._stream = DecodeStream(skip_special_tokens=False)


class _Pattern:
    """Matches any of some spellings, the longest first."""

    def __init__(self, spellings: Sequence[str]) -> None:
        either = "|".join(re.escape(one) for one in sorted(spellings, key=len, reverse=True))
        self._one = re.compile(either)
        self._split = re.compile(f"({either})")
        self.search = self._one.search
        self.sub = self._one.sub
        self.splitlist = self._split.split


def _pattern(spellings: object) -> _Pattern | None:
    found = list(spellings)  # type: ignore[call-overload]
    return _Pattern(found) if found else None


def _is_marker(spelling: str, special: bool, template: str) -> bool:
    """Added tokens that mean something to the model. Runs of spaces and such are text, whoever writes them."""
    tag = spelling[0] + spelling[-1] in ("<>", "[]")
    return len(spelling) > 1 and not spelling.isspace() and (special or tag or spelling in template)
