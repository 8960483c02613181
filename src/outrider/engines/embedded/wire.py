"""Answers on the wire: plain bodies and stream chunks of both endpoints, with vLLM's names for token fields.

Beside ``token_ids`` a choice has ``policy_versions``: which versions of the weights sampled these tokens, as runs
``[[version, number of tokens], ...]``. In a stream only a choice's first chunk has it, and one where the version is
another than before; a chunk without it goes on under the version that was told last.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

from outrider.engines.embedded.requests import Parsed
from outrider.engines.embedded.sequences import Update
from outrider.engines.embedded.vocabulary import Vocabulary
from outrider.types import Json

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's own stand-in."""


class Wire:
    """Builds everything that is sent for one request."""

    def __init__(self, parsed: Parsed, model: str, vocabulary: Vocabulary) -> None:
        self._parsed = parsed
        self._vocabulary = vocabulary
        kind = ("chatcmpl" if parsed.chat else "cmpl", "chat.completion" if parsed.chat else "text_completion")
        self._head: Json = {"id": f"{kind[0]}-{uuid.uuid4().hex}", "object": kind[1], "created": int(time.time())}
        self._head["model"] = model
        if parsed.chat and parsed.stream:
            self._head["object"] = "chat.completion.chunk"
        self._started: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}
        self._told: dict[int, int] = {}
        """Of each choice, the policy version that the client knows."""

    def plain(self, updates: Sequence[Update]) -> Json:
        """The whole answer. `updates` has one entry per choice, in order."""
        chat = self._parsed.chat
        choices = [
            self._choice(u, {"message": {"role": "assistant", "content": u.text}} if chat else {"text": u.text})
            for u in updates
        ]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        if self._parsed.return_token_ids and self._parsed.chat:
            body["prompt_token_ids"] = self._parsed.prompts[0]
        return body

    def opening(self) -> list[Json]:
        """Chunks ahead of the first token: for chat, each choice's role; the very first carries the prompt's ids."""
        if not self._parsed.chat:
            return []
        chunks = []
        for index in range(self._parsed.n):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append({**self._head, "choices": [choice]})
        if self._parsed.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._parsed.prompts[0]
        return chunks

    def chunk(self, update: Update) -> Json | None:
        """One chunk for `update`; None where it would say nothing."""
        silent = not update.text and update.finish_reason is None
        text = {"delta": {"content": update.text}} if self._parsed.chat else {"text": update.text}
        choice = self._choice(update, text)  # also counts, so it comes before leaving
        if silent and not self._parsed.return_token_ids and not self._parsed.logprobs:
            return None
        return {**self._head, "choices": [choice]}

    def closing(self) -> Json | None:
        """The usage chunk, where the client asked for it."""
        if not self._parsed.include_usage:
            return None
        return {**self._head, "choices": [], "usage": self._usage()}

    def _choice(self, update: Update, text: Json) -> Json:
        self._completion_tokens += len(update.token_ids)
        self._cached[update.index] = update.cached_tokens
        choice: Json = {"index": update.index, **text, "logprobs": None, "finish_reason": update.finish_reason}
        if update.stop_reason is not None or update.finish_reason is not None:
            choice["stop_reason"] = update.stop_reason
        if self._parsed.logprobs:
            choice["logprobs"] = self._chat_logprobs(update) if self._parsed.chat else self._text_logprobs(update)
        if self._parsed.return_token_ids:
            choice["token_ids"] = update.token_ids
            self._tell_versions(choice, update)
            if not self._parsed.chat and update.index not in self._started:
                self._started.add(update.index)
                choice["prompt_token_ids"] = self._parsed.prompts[update.index // self._parsed.n]
        return choice

    def _tell_versions(self, choice: Json, update: Update) -> None:
        versions = update.versions
        if len(versions) > 1 or versions[0][0] != self._told.get(update.index):
            choice["policy_versions"] = versions
            self._told[update.index] = versions[-1][0]

    def _chat_logprobs(self, update: Update) -> Json:
        content = []
        for token, logprob, tops in zip(update.token_ids, update.logprobs, update.tops, strict=True):
            entry = self._entry(token, logprob)
            entry["top_logprobs"] = [self._entry(i, value) for i, value in tops]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._vocabulary.token_bytes(token)
        return {"token": _spelling(data), "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(data)}

    def _text_logprobs(self, update: Update) -> Json:
        tokens = [_spelling(self._vocabulary.token_bytes(token)) for token in update.token_ids]
        offset = self._offsets.get(update.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[update.index] = offset
        tops: list[Mapping[str, float] | None] = []
        for token, logprob, row in zip(tokens, update.logprobs, update.tops, strict=True):
            pairs = {_spelling(self._vocabulary.token_bytes(i)): max(value, LOWEST_LOGPROB) for i, value in row}
            tops.append({**pairs, token: max(logprob, LOWEST_LOGPROB)})
        return {"tokens": tokens, "token_logprobs": update.logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _usage(self) -> Json:
        prompt = sum(len(prompt) for prompt in self._parsed.prompts)
        # Of the choices of one prompt, the first is the one that had to compute it.
        cached = sum(self._cached.get(p * self._parsed.n, 0) for p in range(len(self._parsed.prompts)))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _spelling(data: bytes) -> str:
    """A token as text; one that is not whole characters is spelled as OpenAI does, ``bytes:\\xf0\\x9f``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
