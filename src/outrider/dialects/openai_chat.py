"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.openai_dialect import OpenAIDialect
from outrider.dialects.openai_reply import ChoiceFields, Ids, ReplyFields
from outrider.types import Json
from outrider.wire import WireRequest


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


class _Choice(ChoiceFields, gc=False):
    logprobs: _Logprobs | None = None


class _Reply(ReplyFields, gc=False):
    choices: list[_Choice] | None = None


class OpenAIChat(OpenAIDialect):
    """Satisfies `wire.Dialect`."""

    name = "openai_chat"
    routes = ("/v1/chat/completions",)
    request_decoder = msgspec.json.Decoder(_Request)
    reply_decoder = msgspec.json.Decoder(_Reply)

    def from_tree(self, tree: Json) -> WireRequest:
        """A request that was made here, of one in another protocol. Raises `RequestError`."""
        return wire.tree_request(tree, _Request)

    @staticmethod
    def wanted_logprobs(fields: Mapping[str, msgspec.Raw]) -> Any:
        asked = "logprobs" in fields and msgspec.json.decode(fields["logprobs"]) is True
        return None if asked else True

    @staticmethod
    def entries(logprobs: _Logprobs) -> tuple[list[float | None], Ids]:
        found = logprobs.content or ()
        return [entry.logprob for entry in found], [entry.token_id for entry in found]
