"""Anthropic Messages as a dialect of the gateway."""

from __future__ import annotations

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.anthropic_native import MessagesReader
from outrider.dialects.anthropic_reply import MessagesStream, error_body, from_chat, upstream_error
from outrider.dialects.anthropic_request import PREFIX, count_to_chat, to_chat
from outrider.dialects.long_texts import LongTexts
from outrider.dialects.translate import CHAT_PATH, LateSystem
from outrider.dialects.translate_dialect import TranslatedReader, TranslatedRequest, prepare_native, prepare_translated
from outrider.dialects.translate_errors import OVERFLOW_CODE, UpstreamProblem, anthropic_wording, read_error
from outrider.types import Json
from outrider.wire import ErrorReply, ReplyReader, UpstreamRequest, WireRequest

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
    """Satisfies `wire.Dialect`.

    By default the upstream is taken to speak chat completions only; `native` says that it speaks Messages itself, and
    then bytes pass through. `late_system` is for chat templates that refuse a system message after the first.
    """

    name = "anthropic_messages"
    routes = ("/v1/messages",)
    count_route = "/v1/messages/count_tokens"

    def __init__(self, *, native: bool = False, late_system: LateSystem = "system") -> None:
        self.translated = not native
        self._late_system: LateSystem = late_system

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
        if not self.translated:
            return prepare_native(request, overrides=overrides, model=model, names=_NAMES)
        id = PREFIX + call_id if call_id else ""
        texts = LongTexts(request)
        fields = wire.decode_fields(request, texts.decode, of="messages")
        translation = to_chat(fields, id=id, late_system=self._late_system)
        return prepare_translated(translation, texts, overrides=overrides, tokens=tokens, model=model)

    def reader(self, request: UpstreamRequest) -> ReplyReader:
        if not isinstance(request, TranslatedRequest):
            return MessagesReader()
        state = request.translation.state
        stream = MessagesStream(state, prompt_tokens=request.prompt_tokens)
        return TranslatedReader(request, stream, lambda response: from_chat(response, state), upstream_error)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return _encode(_error(status, message, code))

    # -- wire.TokenCounter: an upstream that speaks chat only counts by answering with one token ------------------

    def count_request(self, body: bytes, *, model: str = "") -> UpstreamRequest:
        request = self.parse(body)
        texts = LongTexts(request)
        fields = wire.decode_fields(request, texts.decode, of="messages")
        asked = count_to_chat(fields, late_system=self._late_system).request
        asked |= {"max_tokens": 1} | ({"model": model} if model else {})
        return UpstreamRequest(body=texts.restored(_encode(asked)), sampling={}, path=CHAT_PATH)

    def count_reply(self, status: int, body: bytes) -> ErrorReply:
        if status == 200:
            try:
                return ErrorReply(200, _count(_counted.decode(body).usage.prompt_tokens))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                status, body = 502, self.error(502, f"Upstream: it does not tell the number of tokens: {error}")
        problem = read_error(status, body)
        if problem.overflow is not None and problem.overflow.prompt is not None:
            return ErrorReply(200, _count(problem.overflow.prompt))  # too long to be answered is no reason not to count
        return ErrorReply(problem.status, _encode(upstream_error(problem)))


def _count(tokens: int) -> bytes:
    return _encode({"input_tokens": tokens})


def _error(status: int, message: str, code: str | None) -> Json:
    if code == OVERFLOW_CODE:  # also a gateway's own finding has to be told in the words that clients know
        found = read_error(status, _encode({"message": message, "code": code}))
        message = anthropic_wording(UpstreamProblem(status=400, message=message, overflow=found.overflow))
    return error_body(status, message)
