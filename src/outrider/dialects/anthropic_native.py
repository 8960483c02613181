"""Reading the replies of an upstream that speaks Anthropic Messages itself. Its bytes are passed on unchanged."""

from __future__ import annotations

import msgspec

from outrider.dialects.anthropic_reply import error_body
from outrider.dialects.translate import sse
from outrider.types import Usage
from outrider.wire import ErrorReply, Event, ReplyTokens, SampledChoice


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Error(msgspec.Struct):
    message: str | None = None


class _Message(msgspec.Struct):
    type: str | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None
    error: _Error | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: _Error | None = None


_message = msgspec.json.Decoder(_Message)
_event = msgspec.json.Decoder(_Event)
_READ = (b"message_start", b"message_delta", b"message_stop", b"error")


class MessagesReader:
    """Satisfies `wire.ReplyReader`. There are no token ids in this protocol, so a call is text."""

    def __init__(self) -> None:
        self.terminal = False
        self.error = ""
        self._stop_reason: str | None = None
        self._begun = False
        self._usage = _Usage()
        self._problem = ""

    @property
    def finished(self) -> bool:
        return self._stop_reason is not None

    def body(self, body: bytes) -> bytes:
        try:
            message = _message.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._problem = f"the reply is not valid: {error}"
            return body
        if message.type == "error":
            self._take_error(message.error)
        elif message.type == "message":
            self._take_message(message)
        else:
            self._problem = "the reply is no message"
        return body

    def event(self, event: Event) -> bytes:
        if event.name and event.name not in _READ:
            return event.raw
        if event.data:
            try:
                self._take(_event.decode(event.data))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._problem = self._problem or f"an event is not valid: {error}"
        return event.raw

    def end(self) -> bytes:
        return b""

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return sse(error_body(status, message))

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        return ErrorReply(status, body)

    def result(self) -> ReplyTokens:
        choices = (SampledChoice(index=0, finish_reason=self._stop_reason),) if self._begun else ()
        usage = self._usage
        counted = None
        if usage.input_tokens is not None and usage.output_tokens is not None:
            cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            counted = Usage(prompt_tokens=usage.input_tokens + cached, completion_tokens=usage.output_tokens)
        return ReplyTokens(prompt_ids=None, choices=choices, usage=counted, problem=self._problem)

    def _take(self, event: _Event) -> None:
        if event.type == "message_start" and event.message is not None:
            self._take_message(event.message)
        elif event.type == "message_delta":
            if event.delta is not None:
                self._stop_reason = event.delta.stop_reason
            self._take_usage(event.usage)
        elif event.type == "message_stop":
            self.terminal = True
        elif event.type == "error":
            self._take_error(event.error)

    def _take_message(self, message: _Message) -> None:
        self._begun = True
        self._stop_reason = message.stop_reason
        self._take_usage(message.usage)

    def _take_usage(self, usage: _Usage | None) -> None:
        """Counts are totals, and one that is not named stands."""
        for name in _Usage.__struct_fields__:
            value = getattr(usage, name, None)
            if value is not None:
                setattr(self._usage, name, value)

    def _take_error(self, error: _Error | None) -> None:
        self.error = (error.message if error else None) or "the upstream sent an error without a message"
