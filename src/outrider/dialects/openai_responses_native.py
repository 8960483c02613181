"""Reading the replies of an upstream that speaks the Responses API itself. Its bytes are passed on unchanged."""

from __future__ import annotations

import msgspec

from outrider.dialects.translate import sse
from outrider.types import Usage
from outrider.wire import ErrorReply, Event, ReplyTokens, SampledChoice


class _Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int


class _Error(msgspec.Struct):
    message: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    error: _Error | None = None


class _Event(msgspec.Struct):
    type: str
    response: _Response | None = None
    message: str | None = None
    error: _Error | None = None


_response = msgspec.json.Decoder(_Response)
_event = msgspec.json.Decoder(_Event)
_LAST = ("response.completed", "response.incomplete", "response.failed")
_STATUSES = ("completed", "incomplete", "failed", "cancelled", "in_progress", "queued")
_SKIPPED = (b".delta", b".done", b".added")
_UNNAMED = "the upstream sent an error without a message"


class ResponsesReader:
    """Satisfies `wire.ReplyReader`. There are no token ids in this protocol, so a call is text."""

    def __init__(self) -> None:
        self.terminal = False
        self.error = ""
        self._status: str | None = None
        self._usage: _Usage | None = None
        self._problem = ""
        self._events = 0  # numbered from 0 in this protocol, without a gap

    @property
    def finished(self) -> bool:
        return self._status in ("completed", "incomplete")

    def body(self, body: bytes) -> bytes:
        try:
            response = _response.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._problem = f"the reply is not valid: {error}"
            return body
        if response.status in _STATUSES or response.error is not None:
            self._take(response)
        else:
            self._problem = "the reply is no response"
        return body

    def event(self, event: Event) -> bytes:
        if not event.data:
            return event.raw
        self._events += 1
        if event.name.endswith(_SKIPPED):
            return event.raw
        try:
            found = _event.decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._problem = self._problem or f"an event is not valid: {error}"
            return event.raw
        if found.type == "error":
            message = found.error.message if found.error is not None else found.message
            self.error = message or _UNNAMED
        elif found.response is not None and found.type in _LAST:
            self.terminal = True
            self._take(found.response)
        return event.raw

    def end(self) -> bytes:
        return b""

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return sse(
            {
                "type": "error",
                "sequence_number": self._events,
                "code": code or str(status),
                "message": message,
                "param": None,
            }
        )

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        return ErrorReply(status, body)

    def result(self) -> ReplyTokens:
        choices = (SampledChoice(index=0, finish_reason=self._status),) if self._status is not None else ()
        usage = self._usage
        counted = None
        if usage is not None:
            counted = Usage(prompt_tokens=usage.input_tokens, completion_tokens=usage.output_tokens)
        return ReplyTokens(prompt_ids=None, choices=choices, usage=counted, problem=self._problem)

    def _take(self, response: _Response) -> None:
        self._status = response.status
        self._usage = response.usage
        if response.error is not None or response.status == "failed":
            self.error = (response.error.message if response.error else None) or _UNNAMED
