"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.types import Json
from outrider.wire import UpstreamRequest, WireRequest


class _Message(msgspec.Struct, gc=False):
    role: str


class _Request(wire.RequestHead, gc=False, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None = None
    token_id: int | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Choice(wire.ChoiceFields, gc=False):
    logprobs: _Logprobs | None = None


class _Reply(wire.ReplyFields, gc=False):
    choices: list[_Choice] | None = None


_request = msgspec.json.Decoder(_Request)
_reply = msgspec.json.Decoder(_Reply)


class OpenAIChat:
    """Satisfies `wire.Dialect`."""

    name = "openai_chat"
    routes = ("/v1/chat/completions",)
    translated = False

    def parse(self, body: bytes) -> WireRequest:
        return wire.parse_request(body, _request)

    def from_tree(self, tree: Json) -> WireRequest:
        """A request that was made here, of one in another protocol. Raises `RequestError`."""
        return wire.tree_request(tree, _Request)

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
    asked = "logprobs" in fields and msgspec.json.decode(fields["logprobs"]) is True
    return None if asked else True


def _entries(logprobs: _Logprobs) -> tuple[list[float | None], wire.Ids]:
    entries = logprobs.content or ()
    return [entry.logprob for entry in entries], [entry.token_id for entry in entries]
