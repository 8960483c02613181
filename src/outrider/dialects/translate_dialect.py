"""What two dialects need to satisfy `wire.Dialect` over an upstream that speaks chat completions only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from outrider.dialects import openai_wire as wire
from outrider.dialects.long_texts import LongTexts
from outrider.dialects.openai_chat import OpenAIChat
from outrider.dialects.translate import CHAT_PATH, ChatTranslation, rough_tokens
from outrider.dialects.translate_errors import UpstreamProblem, read_error
from outrider.dialects.translate_stream import as_chunk
from outrider.errors import EngineError
from outrider.types import Json
from outrider.wire import ErrorReply, Event, ReplyTokens, UpstreamRequest, WireRequest

_chat = OpenAIChat()
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Json).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedRequest(UpstreamRequest):
    """A chat request in place of the client's own."""

    path: str = CHAT_PATH
    translation: ChatTranslation[Any]
    prompt_tokens: int | None = None
    """About how many; None where the upstream says so with the first chunk."""


class Translator(Protocol):
    """Turns the chunks of a chat stream into a client's events."""

    failure: str
    """Why the stream could not be completed; empty while all is well."""

    def feed(self, chunk: Json) -> list[bytes]: ...

    def finish(self) -> list[bytes]: ...

    def fail(self, message: str, *, status: int = 500, code: str | None = None) -> list[bytes]: ...

    def refuse(self, problem: UpstreamProblem) -> list[bytes]:
        """A stream that tells of an upstream's error, where clients look for that one there; else nothing."""


def prepare_translated(
    translation: ChatTranslation[Any], texts: LongTexts, *, overrides: Json, tokens: bool, model: str
) -> TranslatedRequest:
    """As `wire.Dialect.prepare`, in the words of chat completions."""
    chat = _chat.prepare(_chat.from_tree(translation.request), overrides=overrides, tokens=tokens, model=model)
    body = texts.restored(chat.body)
    return TranslatedRequest(
        body=body,
        sampling=chat.sampling,
        hidden=chat.hidden,
        notes=translation.notes,
        translation=replace(translation, request={}),  # it may be large, and all of it is in the body
        prompt_tokens=None if tokens else rough_tokens(body),
    )


def prepare_native(request: WireRequest, *, overrides: Json, model: str, names: dict[str, str]) -> UpstreamRequest:
    """For an upstream that speaks the client's dialect. `names` has its words for chat's sampling parameters.

    With a `model` of ours, the reply carries that name: its bytes pass through.
    """
    if not overrides and model in ("", request.model):
        return UpstreamRequest(body=request.body, sampling=request.sampling)
    changed: Json = {names.get(name, name): value for name, value in overrides.items()}
    if model:
        changed["model"] = model
    return UpstreamRequest(body=_encode({**request.fields, **changed}), sampling={**request.sampling, **overrides})


class TranslatedReader:
    """Satisfies `wire.ReplyReader`: reads chat replies for their tokens, and shows the agent its own protocol."""

    def __init__(
        self,
        request: TranslatedRequest,
        translator: Translator,
        whole: Callable[[Json], Json],
        upstream_error: Callable[[UpstreamProblem], Json],
    ) -> None:
        self._tokens = _chat.reader(request)
        self._translator = translator
        self._whole = whole
        self._streams: bool = request.translation.state.stream
        self._upstream_error = upstream_error
        self._error = ""

    @property
    def terminal(self) -> bool:
        return self._tokens.terminal

    @property
    def finished(self) -> bool:
        return self._tokens.finished

    @property
    def error(self) -> str:
        return self._tokens.error or self._translator.failure or self._error

    def body(self, body: bytes) -> bytes:
        """The answer in the agent's protocol; an error body where it can't be taken for one.

        Where a stream was asked for and the upstream gives none, it is made here.
        """
        self._tokens.body(body)
        try:
            reply = _decode(body)
            whole = self._whole(reply)
            if not self._streams:
                return _encode(whole)
            return b"".join((*self._translator.feed(as_chunk(reply)), *self._translator.finish()))
        except (EngineError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._error = str(error)
            problem = UpstreamProblem(status=502, message=f"Upstream: {error}")
            return _encode(self._upstream_error(problem))

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        problem = read_error(status, body)
        events = b"".join(self._translator.refuse(problem))
        if events:
            return ErrorReply(200, events, streamed=True)
        return ErrorReply(problem.status, _encode(self._upstream_error(problem)))

    def event(self, event: Event) -> bytes:
        self._tokens.event(event)
        if event.data == wire.DONE:
            return self.end()
        if not event.data:
            return event.raw  # a comment keeps the connection alive in any protocol
        try:
            return b"".join(self._translator.feed(_decode(event.data)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self.fail(502, f"Upstream: a chunk of its answer is not valid JSON: {error}")

    def end(self) -> bytes:
        try:
            return b"".join(self._translator.finish())
        except RecursionError as error:
            return self.fail(502, f"Upstream: its answer is nested too deeply: {error}")

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return b"".join(self._translator.fail(message, status=status, code=code))

    def result(self) -> ReplyTokens:
        return self._tokens.result()
