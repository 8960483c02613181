"""From a chat-completions answer to an Anthropic message, plain or as its stream of events."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.dialects.anthropic_request import INVALID_JSON, MessagesState
from outrider.dialects.translate import sse
from outrider.dialects.translate_errors import UpstreamProblem, anthropic_wording
from outrider.dialects.translate_reasoning import seal
from outrider.dialects.translate_stream import Act, Block, ChatAnswer, Kind, Step
from outrider.errors import EngineError
from outrider.types import Json

# 503 is no `overloaded_error`: clients give up on that after three tries, and on `api_error` after ten or more.
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
STOP_REASONS = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "length": "max_tokens",
    "content_filter": "refusal",
}
# What a message and its events have, or may have.
FIELDS = frozenset({
    "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "stop_details", "usage", "container",
    "context_management", "diagnostics", "message", "delta", "index", "error",
})  # fmt: skip
# While a tool's input is held back until it is whole, the client still hears from us.
PING_EVERY = 50

_encode = msgspec.json.Encoder().encode


def error_body(status: int, message: str) -> Json:
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if 400 <= status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def upstream_error(problem: UpstreamProblem) -> Json:
    return error_body(problem.status, anthropic_wording(problem))


def from_chat(response: Json, state: MessagesState) -> Json:
    """A plain answer. Raises `EngineError` for one that can't be taken for the model's."""
    answer = ChatAnswer(state.id, shows_ids=state.shows_ids)
    answer.whole(response)
    if answer.error or answer.problem:
        raise EngineError(answer.error or answer.problem)
    if answer.finish_reason is None:
        raise EngineError("the upstream's answer has no finish_reason")
    return {
        **_own(answer.extras),
        **_head(state),
        "content": [_content(block, state) for block in answer.blocks if _is_shown(block, state)],
        **_stop(answer),
        "usage": _usage(answer),
    }


class MessagesStream:
    """Turns the chunks of one streamed answer into Anthropic's events.

    ``message_start`` tells the number of input tokens, so nothing is sent before it is known: from `prompt_tokens` if
    the caller counted, else from the first chunk that has usage or prompt ids.
    """

    def __init__(self, state: MessagesState, *, prompt_tokens: int | None = None) -> None:
        self._state = state
        self._answer = ChatAnswer(state.id, shows_ids=state.shows_ids)
        self._told: Json = {}
        """Fields of the engine's own that were sent."""
        self._prompt_tokens = prompt_tokens
        self._started = False
        self._ended = False
        self._held: list[bytes] = []
        self._indexes: dict[Block, int] = {}
        self._silent = 0
        self.failure = ""

    def feed(self, chunk: Json) -> list[bytes]:
        """Events for one chunk; none where it holds nothing to show."""
        if self._ended:
            return []
        steps = self._answer.chunk(chunk)
        if self._answer.error:
            return self.fail(self._answer.error)
        return self._send(steps)

    def finish(self) -> list[bytes]:
        """The end of the stream was reached. It is an error where the answer was not complete."""
        if self._ended:
            return []
        answer = self._answer
        steps = answer.end()
        if answer.problem:
            return self.fail(f"The upstream sent {answer.problem}.")
        if answer.finish_reason is None:
            return self.fail("The upstream's stream ended before its answer did.")
        events = self._send(steps, last=True)
        self._ended = True
        late = {name: value for name, value in _own(answer.extras).items() if value != self._told.get(name)}
        delta = {**late, "type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)}
        return [*events, sse(delta), sse({"type": "message_stop"})]

    def fail(self, message: str, *, status: int = 500, code: str | None = None) -> list[bytes]:
        """The answer can't be completed: the protocol's own error event, and nothing after it.

        Called after `finish`, it takes the place of the events that `finish` gave: those must not have been sent.
        """
        if self.failure:
            return []
        self._ended = True
        self.failure = message
        return [sse(error_body(status, message))]

    def refuse(self, problem: UpstreamProblem) -> list[bytes]:
        """Nothing: clients look at the status."""
        return []

    def _send(self, steps: list[Step], *, last: bool = False) -> list[bytes]:
        events = [event for step in steps for event in self._events(step)]
        if self._started:
            return events
        known = self._answer.counts.prompt
        tokens = known if known is not None else self._prompt_tokens
        if tokens is None and not last:
            self._held += events
            return []
        self._started = True
        held, self._held = self._held, []
        usage = _usage(self._answer) | {"output_tokens": 0}
        if known is None:
            usage["input_tokens"] = tokens or 0
        self._told = _own(self._answer.extras)
        start = {
            **self._told,
            **_head(self._state),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [sse({"type": "message_start", "message": start}), *held, *events]

    def _events(self, step: Step) -> list[bytes]:
        block, state = step.block, self._state
        if not _is_shown(block, state):
            return []
        if step.act is Act.OPEN:
            index = self._indexes[block] = len(self._indexes)
            return [sse({"type": "content_block_start", "index": index, "content_block": _empty(block)})]
        index = self._indexes[block]
        if step.act is Act.ADD:
            return self._add(block, index, step.piece.text)
        events = []
        if block.kind is Kind.CALL and not (block.name in state.eager_tools and block.text.strip()):
            events.append(_delta(index, "input_json_delta", partial_json=_input_text(block)))
        elif block.kind is Kind.REASONING:
            events.append(_delta(index, "signature_delta", signature=seal(block.text)))
        return [*events, sse({"type": "content_block_stop", "index": index})]

    def _add(self, block: Block, index: int, text: str) -> list[bytes]:
        if block.kind is Kind.CALL:
            if block.name in self._state.eager_tools:
                return [_delta(index, "input_json_delta", partial_json=text)]
            self._silent += 1
            return [] if self._silent % PING_EVERY else [sse({"type": "ping"})]
        if block.kind is Kind.REASONING:
            return [_delta(index, "thinking_delta", thinking=text)] if self._state.thinking_text else []
        return [_delta(index, "text_delta", text=text)]


# -- parts of a message ------------------------------------------------------------------------------------------------


def _head(state: MessagesState) -> Json:
    return {"id": state.id, "type": "message", "role": "assistant", "model": state.model}


def _own(extras: Json) -> Json:
    """Fields of the engine's own, but for those that mean something else in a message or its events."""
    return {name: value for name, value in extras.items() if name not in FIELDS}


def _is_shown(block: Block, state: MessagesState) -> bool:
    return state.thinking or block.kind is not Kind.REASONING


def _empty(block: Block) -> Json:
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content(block: Block, state: MessagesState) -> Json:
    if block.kind is Kind.CALL:
        return _empty(block) | {"input": msgspec.json.decode(_input_text(block))}
    if block.kind is Kind.REASONING:
        text = block.text
        return {"type": "thinking", "thinking": text if state.thinking_text else "", "signature": seal(text)}
    return {"type": "text", "text": block.text}


def _input_text(block: Block) -> str:
    """A tool's input as the JSON text of an object, whatever the model wrote."""
    text = block.text
    if not text.strip():
        return "{}"
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return text
    except (msgspec.DecodeError, RecursionError):
        pass
    return _encode({INVALID_JSON: text}).decode()


def _delta(index: int, kind: str, **fields: str) -> bytes:
    return sse({"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}})


def _stop(answer: ChatAnswer) -> Json:
    reason: Any = STOP_REASONS.get(answer.finish_reason or "", "end_turn")
    if reason in ("end_turn", "tool_use"):
        reason = "tool_use" if answer.has_calls else "end_turn"  # some engines say stop after a call
    if any(block.kind is Kind.REFUSAL for block in answer.blocks):
        reason = "refusal"
    if reason == "end_turn" and answer.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(answer: ChatAnswer) -> Json:
    """Anthropic's input tokens leave out those read from a cache; the sum of both is the prompt."""
    counts = answer.counts
    usage: Json = {
        "input_tokens": max(0, (counts.prompt or 0) - counts.cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": answer.output_tokens,
    }
    if counts.reasoning is not None:
        usage["output_tokens_details"] = {"thinking_tokens": counts.reasoning}
    return usage
