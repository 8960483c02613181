"""OpenAI Completions, with text or token-id prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.openai_dialect import OpenAIDialect
from outrider.dialects.openai_reply import ChoiceFields, Ids, ReplyFields


class _Request(wire.RequestHead, gc=False, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] | None = None


class _Choice(ChoiceFields, gc=False):
    logprobs: _Logprobs | None = None


class _Reply(ReplyFields, gc=False):
    choices: list[_Choice] | None = None


class OpenAICompletions(OpenAIDialect):
    """Satisfies `wire.Dialect`."""

    name = "openai_completions"
    routes = ("/v1/completions",)
    request_decoder = msgspec.json.Decoder(_Request)
    reply_decoder = msgspec.json.Decoder(_Reply)

    @staticmethod
    def wanted_logprobs(fields: Mapping[str, msgspec.Raw]) -> Any:
        """1 rather than 0: some engines take 0 for none."""
        asked = bytes(fields.get("logprobs", b"null")) != b"null"
        return None if asked else 1

    @staticmethod
    def entries(logprobs: _Logprobs) -> tuple[list[float | None], Ids]:
        return logprobs.token_logprobs or [], []
