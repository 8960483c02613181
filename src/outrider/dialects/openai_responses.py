"""OpenAI Responses as a dialect of the gateway."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.long_texts import LongTexts
from outrider.dialects.openai_responses_history import PREFIX, REFERENCE, RecentResponses, references
from outrider.dialects.openai_responses_native import ResponsesReader
from outrider.dialects.openai_responses_reply import (
    ResponsesStream,
    conversation,
    error_body,
    from_chat,
    upstream_error,
)
from outrider.dialects.openai_responses_request import ResponsesState, to_chat
from outrider.dialects.translate import LateSystem
from outrider.dialects.translate_dialect import TranslatedReader, TranslatedRequest, prepare_native, prepare_translated
from outrider.types import Json
from outrider.wire import ReplyReader, UpstreamRequest, WireRequest

_REFERENCE = REFERENCE.encode()
_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens"}


class _Request(wire.RequestHead, gc=False, kw_only=True):
    max_output_tokens: int | None = None


_request = msgspec.json.Decoder(_Request)
_encode = msgspec.json.Encoder().encode


class OpenAIResponses:
    """Satisfies `wire.Dialect`.

    By default the upstream is taken to speak chat completions only; `native` says that it speaks Responses itself, and
    then bytes pass through. `history` answers ``previous_response_id``; by default it is a memory of this object's own.
    A response is named after its call, so that it can be found again where the calls are kept.
    """

    name = "openai_responses"
    routes = ("/v1/responses",)

    def __init__(
        self, *, native: bool = False, history: RecentResponses | None = None, late_system: LateSystem = "system"
    ) -> None:
        self.translated = not native
        self._history = RecentResponses() if history is None else history
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
        is_kept = len(request.body) <= self._history.longest
        texts = LongTexts(request, held=not is_kept)
        fields = wire.decode_fields(request, texts.decode, of="input")
        translation = to_chat(
            fields,
            id=PREFIX + call_id if call_id else "",
            history=self._history.of(owner),
            late_system=self._late_system,
        )
        if not is_kept:  # nor need it be held until the answer has come
            translation = replace(translation, state=replace(translation.state, items=(), history=None))
        return prepare_translated(translation, texts, overrides=overrides, tokens=tokens, model=model)

    def reader(self, request: UpstreamRequest) -> ReplyReader:
        if not isinstance(request, TranslatedRequest):
            return ResponsesReader()
        state: ResponsesState = request.translation.state

        def keep(response: Json) -> None:
            if state.history is not None:
                state.history.keep(state.id, conversation(state, response)[state.inherited :], state.previous)

        def whole(reply: Json) -> Json:
            response = from_chat(reply, state)
            keep(response)
            return response

        return TranslatedReader(request, ResponsesStream(state, on_response=keep), whole, upstream_error)

    # -- wire.Recaller -------------------------------------------------------------------------------------------------

    def names(self, request: WireRequest) -> tuple[str, ...]:
        if not self.translated:
            return ()
        fields = request.fields
        try:
            previous = msgspec.json.decode(fields["previous_response_id"]) if "previous_response_id" in fields else None
            # To parse all of the input would cost more than all else that is done with it here.
            refers = "input" in fields and _REFERENCE in request.body
            items = msgspec.json.decode(fields["input"]) if refers else []
        except (msgspec.DecodeError, RecursionError):
            return ()  # `prepare` says what is wrong with it
        named = [previous] if isinstance(previous, str) and previous.startswith(PREFIX) else []
        named += references(items) if isinstance(items, list) else []
        return tuple(dict.fromkeys(id.removeprefix(PREFIX) for id in named))

    def knows(self, owner: str, call_id: str) -> bool:
        return self._history.has(owner, PREFIX + call_id)

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        return _encode(error_body(status, message, code=code, param=param))
