"""OpenAI Completions, with text or token-id prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.types import Json
from outrider.wire import UpstreamRequest, WireRequest


class _Request(wire.RequestHead, gc=False, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None
    logprobs: int | None = None


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] | None = None


class _Choice(wire.ChoiceFields, gc=False):
    logprobs: _Logprobs | None = None


class _Reply(wire.ReplyFields, gc=False):
    choices: list[_Choice] | None = None


_request = msgspec.json.Decoder(_Request)
_reply = msgspec.json.Decoder(_Reply)


class OpenAICompletions:
    """Satisfies `wire.Dialect`."""

    name = "openai_completions"
    routes = ("/v1/completions",)
    translated = False

    def parse(self, body: bytes) -> WireRequest:
        return wire.parse_request(body, _request)

    def prepare(
        self,
        request: WireRequest,
        *,
        overrides: Json,
        tokens: bool,
        model: str = "",
        owner: str = "",
        call_id: str = "",
    ) -> UpstreamRequest:
        return wire.prepare_request(request, overrides=overrides, tokens=tokens, model=model, logprobs=_wanted_logprobs)

    def reader(self, request: UpstreamRequest) -> wire.OpenAIReader:
        return wire.OpenAIReader(request, _reply, _entries)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return wire.error_body(status, message, code=code, param=param)


def _wanted_logprobs(fields: Mapping[str, msgspec.Raw]) -> Any:
    """1 rather than 0: some engines take 0 for none."""
    asked = bytes(fields.get("logprobs", b"null")) != b"null"
    return None if asked else 1


def _entries(logprobs: _Logprobs) -> tuple[list[float | None], wire.Ids]:
    return logprobs.token_logprobs or [], []
