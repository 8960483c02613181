"""What Chat Completions and Completions have in common as dialects of the gateway."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.openai_reply import Ids, OpenAIReader
from outrider.types import Json
from outrider.wire import UpstreamRequest, WireRequest


class OpenAIDialect(ABC):
    """Satisfies `wire.Dialect`. A protocol says what its requests and replies look like, and its log-probs."""

    name: str
    routes: tuple[str, ...]
    translated = False
    request_decoder: msgspec.json.Decoder[Any]
    reply_decoder: msgspec.json.Decoder[Any]

    def parse(self, body: bytes) -> WireRequest:
        return wire.parse_request(body, self.request_decoder)

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
        return wire.prepare_request(
            request, overrides=overrides, tokens=tokens, model=model, logprobs=self.wanted_logprobs
        )

    def reader(self, request: UpstreamRequest) -> OpenAIReader:
        return OpenAIReader(request, self.reply_decoder, self.entries)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return wire.error_body(status, message, code=code, param=param)

    @staticmethod
    @abstractmethod
    def wanted_logprobs(fields: Mapping[str, msgspec.Raw]) -> Any:
        """The value of ``logprobs`` that asks for them; None where the agent asked itself."""

    @staticmethod
    @abstractmethod
    def entries(logprobs: Any) -> tuple[list[float | None], Ids]:
        """The log-probs of a choice, and token ids where they lie beside them."""
