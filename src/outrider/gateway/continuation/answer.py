"""From sampled ids to the chat answer that a dialect reads: completions come in, chat completions go out.

The text that the engine made of the ids is not used. It has lost what a tool call or a thought is marked with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.gateway.continuation.request import ChatRequest
from outrider.types import Json
from outrider.wire import ParsedCall, Renderer, ReplyDelta


def call_id(prompt_ids: Sequence[int], index: int, number: int, model_id: str = "") -> str:
    """The id of a tool call: the model's own, or one that follows from the prompt, so that it is found again.

    Sorted by id, calls of one answer are in order: some agents tell them, and what came of them, in that order.
    """
    if model_id:
        return model_id
    seed = np.asarray(prompt_ids, dtype=np.int32).tobytes() + b"%d" % index
    return f"call_{hashlib.blake2b(seed, digest_size=10).hexdigest()}{number:04x}"


class StopStrings:
    """Cuts text where a stop string begins, as the engine did; holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str], *, keep: bool) -> None:
        self._stop = () if keep else tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        if not self._stop:
            return text
        if self.matched:
            return ""
        self._held += text
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            out, self._held = self._held[: min(found)], ""
            return out
        sure = len(self._held) - max(_overlap(self._held, stop) for stop in self._stop)
        out, self._held = self._held[:sure], self._held[sure:]
        return out

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class Answer:
    """One that can be gone on from."""

    message: Json
    """As it was told, in the shape of `plain_messages`, with what the agent had written of it itself."""
    stopped: str = ""
    """Where a stop string ended it, its text with that: what was sampled, and what the agent may have written on."""


@dataclass(slots=True)
class Message:
    """An answer as it was told to the agent."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def plain(self) -> Json:
        """In the shape of `plain_messages`, as if the agent had sent it back."""
        message: Json = {"role": "assistant", "content": "".join(self.content)}
        reasoning = "".join(self.reasoning).strip()
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def wire(self) -> Json:
        content = "".join(self.content)
        message: Json = {"role": "assistant", "content": content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class AnswerStream:
    """One choice. `feed` and `finish` give the delta for the agent, None where there is nothing to tell."""

    def __init__(self, renderer: Renderer, request: ChatRequest, prompt_ids: Sequence[int], index: int) -> None:
        self.message = Message()
        self.started = False
        tools = request.tools if request.parses_calls else []
        self._parser = renderer.parser(prompt_ids, tools, begun=request.begun)
        self._begun = request.begun
        self._stop = StopStrings(request.stop, keep=request.keeps_stop)
        self._prompt_ids = prompt_ids
        self._index = index
        self._content: list[str] = []

    def feed(self, token_ids: Sequence[int]) -> Json | None:
        return self._tell(self._parser.feed(token_ids), last=False)

    def finish(self) -> Json | None:
        return self._tell(self._parser.finish(), last=True)

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self.message.calls and reason == "stop" else reason

    def answer(self) -> Answer:
        """What there is of it."""
        stopped = self._begun + "".join(self._content) if self._stop.matched else ""
        return Answer(begun_by(self._begun, self.message.plain()), stopped)

    def _tell(self, part: ReplyDelta, *, last: bool) -> Json | None:
        delta: Json = {}
        self._content.append(part.content)
        content = self._stop.push(part.content) + (self._stop.finish() if last else "")
        if part.reasoning:
            self.message.reasoning.append(part.reasoning)
            delta["reasoning_content"] = part.reasoning
        if content:
            self.message.content.append(content)
            delta["content"] = content
        if part.calls and not self._stop.matched:
            delta["tool_calls"] = self._calls(part.calls)
        return delta or None

    def _calls(self, calls: Sequence[ParsedCall]) -> list[Json]:
        told = []
        for call in calls:
            number = len(self.message.calls)
            made: Json = {
                "id": call_id(self._prompt_ids, self._index, number, call.id),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            self.message.calls.append(made)
            told.append({"index": number, **made})
        return told


def begun_by(begun: str, message: Json) -> Json:
    """`message`, a plain one, with the beginning that the agent had written of it."""
    return {**message, "content": begun + message["content"]} if begun else message


def parse_answer(
    renderer: Renderer, request: ChatRequest, prompt_ids: Sequence[int], index: int, ids: Sequence[int]
) -> Answer:
    """The whole of a recorded answer, as it was told."""
    stream = AnswerStream(renderer, request, prompt_ids, index)
    stream.feed(ids)
    stream.finish()
    return stream.answer()


def chat_logprobs(logprobs: Any, top: int) -> Json | None:
    """Log-probs of completions in the shape that chat has them."""
    if not isinstance(logprobs, dict):
        return None
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    entries = []
    for token, value, others in zip(tokens, values, tops, strict=False):
        entry = _entry(str(token), value)
        ranked = sorted((others or {}).items(), key=lambda item: -item[1])[:top]
        entry["top_logprobs"] = [_entry(str(name), number) for name, number in ranked]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def _entry(token: str, value: Any) -> Json:
    return {"token": token, "logprob": value, "bytes": list(token.encode(errors="surrogatepass"))}


def _overlap(text: str, word: str) -> int:
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
