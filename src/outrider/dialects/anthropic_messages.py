"""Anthropic Messages as a dialect of the gateway."""

from __future__ import annotations

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.anthropic_native import MessagesReader
from outrider.dialects.anthropic_reply import MessagesStream, error_body, from_chat, upstream_error
from outrider.dialects.anthropic_request import count_to_chat, to_chat
from outrider.dialects.translate import LateSystem, sse
from outrider.dialects.translate_dialect import TranslatedReader, TranslatedRequest, prepare_native, prepare_translated
from outrider.dialects.translate_errors import OVERFLOW_CODE, UpstreamProblem, anthropic_wording, read_error
from outrider.protocols import ReplyReader, UpstreamRequest, WireRequest
from outrider.types import Json

COUNT_PATH = "/v1/messages/count_tokens"
_NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}


class _Request(wire.RequestHead, gc=False, kw_only=True):
    pass


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Counted(msgspec.Struct):
    usage: _Usage


_request = msgspec.json.Decoder(_Request)
_counted = msgspec.json.Decoder(_Counted)
_encode = msgspec.json.Encoder().encode


class AnthropicMessages:
    """Satisfies `protocols.Dialect`.

    By default the upstream is taken to speak chat completions only; `native` says that it speaks Messages itself, and
    then bytes pass through. `late_system` is for chat templates that refuse a system message after the first.
    """

    name = "anthropic_messages"
    routes = ("/v1/messages",)

    def __init__(self, *, native: bool = False, late_system: LateSystem = "system") -> None:
        self._native = native
        self._late_system: LateSystem = late_system

    def parse(self, body: bytes) -> WireRequest:
        return wire.parse_request(body, _request)

    def prepare(self, request: WireRequest, *, overrides: Json, tokens: bool) -> UpstreamRequest:
        if self._native:
            return prepare_native(request, overrides=overrides, names=_NAMES)
        translation = to_chat(_fields(request), late_system=self._late_system)
        return prepare_translated(translation, overrides=overrides, tokens=tokens)

    def reader(self, request: UpstreamRequest) -> ReplyReader:
        if not isinstance(request, TranslatedRequest):
            return MessagesReader()
        state = request.translation.state
        stream = MessagesStream(state, prompt_tokens=request.prompt_tokens)
        return TranslatedReader(request, stream, lambda response: from_chat(response, state), upstream_error)

    def error(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return _encode(_error(status, message, code))

    def error_event(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return sse(_error(status, message, code))

    # -- count_tokens: an upstream that speaks chat only counts by answering with one token ---------------------------

    def count_request(self, body: bytes) -> bytes:
        """The chat request that tells how many tokens the body of a `COUNT_PATH` call has. Raises `RequestError`."""
        translation = count_to_chat(_fields(self.parse(body)), late_system=self._late_system)
        return _encode({**translation.request, "max_tokens": 1})

    def count_reply(self, body: bytes) -> bytes:
        """The answer to the client, from the answer to `count_request`. Raises `msgspec.MsgspecError`."""
        return _encode({"input_tokens": _counted.decode(body).usage.prompt_tokens})


def _fields(request: WireRequest) -> Json:
    return {name: msgspec.json.decode(raw) for name, raw in request.fields.items()}


def _error(status: int, message: str, code: str | None) -> Json:
    if code == OVERFLOW_CODE:  # also a gateway's own finding has to be told in the words that clients know
        found = read_error(status, _encode({"message": message, "code": code}))
        message = anthropic_wording(UpstreamProblem(status=400, message=message, overflow=found.overflow))
    return error_body(status, message)
