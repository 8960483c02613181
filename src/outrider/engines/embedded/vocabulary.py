"""The tokenizer as the engine needs it: encode, render a chat, bytes of a token, and which tokens end an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from outrider.errors import ConfigError
from outrider.types import Json


class TemplateError(Exception):
    """The chat template refused the messages; the message is for the client."""


class Vocabulary:
    """Wraps the tokenizer in a model folder. Raises `ConfigError` when there is no usable one."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model: no usable tokenizer in {str(folder)!r}: {error}") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(f"model: {str(folder)!r} has no tokenizer.json (a fast tokenizer), which is needed.")
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes = _byte_table(backend, {i: token.content for i, token in added.items()})
        self.has_template = bool(self._tokenizer.chat_template)
        self.stop_ids = frozenset(self._find_stop_ids(folder))
        self._joint = self._find_joint()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a special token's own spelling; empty past the end of the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None, extra: Json | None = None) -> list[int]:
        """Ids of a conversation, with the generation prompt unless `extra` says otherwise. Raises `TemplateError`."""
        if not self.has_template:
            raise TemplateError("this model has no chat template; use /v1/completions")
        options: Json = {"add_generation_prompt": True, **(extra or {}), "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template(
                [_for_template(message, self._joint) for message in messages],
                tools=list(tools) if tools else None,
                **options,
            )
        except Exception as error:  # a template is a program of the model's author: anything can come out of it
            raise TemplateError(f"the chat template refused the messages: {error}") from error
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _find_stop_ids(self, folder: Path) -> set[int]:
        """End tokens from the generation config, the config, the tokenizer and the end of a rendered answer."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            file = folder / name
            if file.is_file():
                eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                found.update([eos] if isinstance(eos, int) else eos or [])
        if self._tokenizer.eos_token_id is not None:
            found.add(self._tokenizer.eos_token_id)
        found.update(self._turn_end())
        return found

    def _find_joint(self) -> str:
        """What stands between text parts of one message: the template's own, else a newline, as vLLM does it."""
        one, two = "\ufdd1", "\ufdd2"  # in no template
        parts = [{"type": "text", "text": one}, {"type": "text", "text": two}]
        try:
            text = str(self._tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False))
        except Exception:
            return "\n"  # it takes strings
        between = text.partition(one)[2].partition(two)[0]
        return between if two in text and not between.strip() else "\n"

    def _turn_end(self) -> set[int]:
        """The special token that the chat template puts right after an assistant's answer, if it puts one."""
        answer = "answer"
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            text = str(self._tokenizer.apply_chat_template(chat, tokenize=False)) if self.has_template else ""
        except Exception:
            return set()  # a template that refuses this plain chat tells us nothing
        _, found, rest = text.rpartition(answer)
        ids = self._tokenizer.encode(rest.lstrip(), add_special_tokens=False)[:1] if found else []
        return {i for i in ids if i in self.special_ids}


def _for_template(message: Json, joint: str) -> Json:
    """A wire message as templates expect it: text parts joined, arguments of tool calls as mappings.

    Arguments that are no JSON object stay the string they are; the template may print or refuse them.
    """
    shaped = dict(message)
    content = shaped.get("content")
    if isinstance(content, list):
        shaped["content"] = joint.join(part["text"] for part in content)
    elif content is None:
        shaped["content"] = ""
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = [_call_for_template(call) for call in shaped["tool_calls"]]
    return shaped


def _call_for_template(call: Json) -> Json:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def _byte_table(backend: Any, added: dict[int, str]) -> list[bytes]:
    """Bytes of each id. Byte-level BPE and SentencePiece spell bytes in their pieces; others are decoded one by one."""
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    pieces: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(pieces.values(), default=-1) + 1)
    letters = _byte_letters() if "ByteLevel" in decoder else None
    sentencepiece = "ByteFallback" in decoder or "Metaspace" in decoder or "▁" in decoder
    for piece, i in pieces.items():
        if i in added:
            table[i] = added[i].encode()
        elif letters is not None:
            table[i] = b"".join(letters.get(letter, letter.encode()) for letter in piece)
        elif sentencepiece and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            table[i] = bytes([int(piece[3:5], 16)])
        elif sentencepiece:
            table[i] = piece.replace("▁", " ").encode()
        else:
            table[i] = str(backend.decode([i], skip_special_tokens=False)).encode()
    return table


def _byte_letters() -> dict[str, bytes]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    letters = {chr(b): bytes([b]) for b in printable}
    letters.update({chr(0x100 + n): bytes([b]) for n, b in enumerate(others)})
    return letters
