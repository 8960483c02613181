"""Replies of the two OpenAI text protocols, plain and streamed, read for their tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from outrider.dialects.openai_hidden import Known, event_with, shown
from outrider.dialects.openai_wire import DONE, LOGPROBS, TOKEN_IDS, USAGE, error_event
from outrider.dialects.utf8 import check_utf8
from outrider.types import IntArray, Runs, Usage
from outrider.wire import ErrorReply, Event, ReplyTokens, SampledChoice, UpstreamRequest, id_array

Ids = list[int | None]

_encode = msgspec.json.Encoder().encode


class _UsageFields(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    """A choice of a reply or chunk; subclasses add `logprobs` in their protocol's shape."""

    index: int = 0
    token_ids: Ids | None = None
    prompt_token_ids: Ids | None = None
    finish_reason: str | None = None
    policy_versions: list[tuple[int, int]] | None = None


class ReplyFields(msgspec.Struct, gc=False):
    """A reply or chunk; subclasses add `choices`."""

    prompt_token_ids: Ids | None = None
    usage: _UsageFields | None = None
    model: msgspec.Raw = msgspec.Raw()
    error: Any = None
    object: Any = None
    message: Any = None


class _Tally:
    """One choice as it comes in."""

    __slots__ = ("entry_ids", "finish_reason", "logprobs", "token_ids", "versions")

    def __init__(self) -> None:
        self.token_ids: Ids = []
        self.entry_ids: Ids = []
        self.logprobs: list[float | None] = []
        self.finish_reason: str | None = None
        self.versions: list[tuple[int, int]] = []
        """``(version, from which token on)``."""

    def tell_versions(self, runs: list[tuple[int, int]]) -> None:
        """Those of the next tokens."""
        at = len(self.token_ids)
        for version, count in runs:
            if not self.versions or self.versions[-1][0] != version:
                self.versions.append((version, at))
            at += count

    def runs(self) -> Runs:
        ends = [at for _, at in self.versions[1:]] + [len(self.token_ids)]
        return tuple((version, end - at) for (version, at), end in zip(self.versions, ends, strict=True))


class OpenAIReader:
    """Reads replies of both protocols.

    `reply` decodes a reply or chunk into a `ReplyFields`; `entries` gives the log-probs of a choice and, where its
    entries carry them, their token ids.
    """

    def __init__(
        self,
        request: UpstreamRequest,
        reply: msgspec.json.Decoder[Any],
        entries: Callable[[Any], tuple[list[float | None], Ids]],
    ) -> None:
        self._hidden = request.hidden
        self._model = msgspec.Raw(_encode(request.model)) if request.model else None
        self._reply = reply
        self._entries = entries
        self._choices: dict[int, _Tally] = {}
        self._prompt_ids: Ids | IntArray | None = None
        self._usage: Usage | None = None
        self._problem = ""
        self._unreadable = False
        self.terminal = False
        self.error = ""

    @property
    def finished(self) -> bool:
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def body(self, body: bytes) -> bytes:
        known = self._take(body)
        return self._shown(body, known) if self._choices else body

    def event(self, event: Event) -> bytes:
        data = event.data
        if self._gave_up():
            return b""  # the agent was told, and an end after that would be taken for a clean one
        if data == DONE:
            self.terminal = True
            return event.raw
        if not data:
            return event.raw
        known = self._take(data)
        if self._gave_up():
            self.error = f"an event of its stream cannot be read: {self._problem}"
            return self.fail(502, f"Upstream: {self.error}.")
        if known is not None and known.only_usage and USAGE in self._hidden:
            return b""
        kept = self._shown(data, known)
        if kept is data:
            return event.raw
        return event_with(event, kept)

    def _gave_up(self) -> bool:
        """An event came that no client can read."""
        return self._unreadable

    def end(self) -> bytes:
        return b""

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return error_event(status, message, code=code)

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        return ErrorReply(status, body)

    def result(self) -> ReplyTokens:
        choices = []
        problem = self._problem
        for index, tally in sorted(self._choices.items()):
            ids, entry_ids = tally.token_ids, tally.entry_ids
            if entry_ids.count(None) < len(entry_ids):
                if not ids:
                    ids = entry_ids
                elif ids != entry_ids:
                    problem = problem or f"choice {index}: token_ids differ from the ids of its log-probs"
            choices.append(
                SampledChoice(
                    index=index,
                    token_ids=ids,
                    logprobs=tally.logprobs,
                    finish_reason=tally.finish_reason,
                    versions=tally.runs() if tally.versions else (),
                )
            )
        return ReplyTokens(prompt_ids=self._prompt_ids, choices=tuple(choices), usage=self._usage, problem=problem)

    def _take(self, data: bytes) -> Known | None:
        """Read one JSON object; returns what it had, None where it is no reply as we know them."""
        try:
            check_utf8(data)  # the parser checks no string that it skips
            reply = self._reply.decode(data)
        except msgspec.ValidationError as error:
            self._problem = self._problem or f"a field of the reply has another type: {error}"
            self._take_loosely(data)
            return None
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._problem = self._problem or f"the reply is not valid JSON: {error}"
            self._take_loosely(data)
            return None
        if reply.error:
            self.error = _error_text(reply.error)
        elif reply.object == "error":
            self.error = _error_text({"message": reply.message})
        if reply.prompt_token_ids:
            self._take_prompt(reply.prompt_token_ids)
        usage = reply.usage
        if usage is not None and usage.prompt_tokens is not None:
            self._usage = Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens or 0)
        choices = reply.choices
        id_lists, versions = int(reply.prompt_token_ids is not None), 0
        for choice in choices or ():
            self._take_choice(choice)
            id_lists += (choice.token_ids is not None) + (choice.prompt_token_ids is not None)
            versions += choice.policy_versions is not None
        return Known(
            id_lists=id_lists, versions=versions, model=reply.model, only_usage=usage is not None and not choices
        )

    def _take_choice(self, choice: Any) -> None:
        tally = self._choices.get(choice.index)
        if tally is None:
            tally = self._choices[choice.index] = _Tally()
        if choice.prompt_token_ids:
            self._take_prompt(choice.prompt_token_ids)
        if choice.policy_versions is not None:
            told, ids = sum(count for _, count in choice.policy_versions), len(choice.token_ids or ())
            if told == ids:
                tally.tell_versions(choice.policy_versions)
            else:
                self._problem = self._problem or f"choice {choice.index}: policy_versions of {told} tokens for {ids}"
        if choice.token_ids:
            tally.token_ids += choice.token_ids
        if choice.logprobs is not None:
            logprobs, entry_ids = self._entries(choice.logprobs)
            tally.logprobs += logprobs
            tally.entry_ids += entry_ids
        if choice.finish_reason is not None:
            tally.finish_reason = choice.finish_reason

    def _take_prompt(self, ids: Ids) -> None:
        if self._prompt_ids is None:
            packed = id_array(ids)
            self._prompt_ids = ids if packed is None else packed
        elif not np.array_equal(np.asarray(self._prompt_ids), np.asarray(ids)):
            self._problem = self._problem or "choices with different prompts in one call"

    def _take_loosely(self, data: bytes) -> None:
        """Of a reply with unexpected types, keep that it has choices and whether they ended.

        Python's parser, since agents in Python will use it: it takes ``-Infinity`` and half surrogates.
        """
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self._unreadable = True
            return
        if reply.get("error"):
            self.error = _error_text(reply["error"])
        choices = reply.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                index = choice.get("index")
                tally = self._choices.setdefault(index if isinstance(index, int) else position, _Tally())
                if isinstance(choice.get("finish_reason"), str):
                    tally.finish_reason = choice["finish_reason"]

    def _shown(self, data: bytes, known: Known | None) -> bytes:
        hidden = self._hidden
        return shown(data, known, ids=TOKEN_IDS in hidden, logprobs=LOGPROBS in hidden, model=self._model)


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the upstream sent an error without a message")
