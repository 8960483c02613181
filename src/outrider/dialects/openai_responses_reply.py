"""From a chat-completions answer to an OpenAI response, plain or as its stream of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.dialects.openai_responses_request import ResponsesState
from outrider.dialects.openai_responses_tools import custom_input
from outrider.dialects.translate import sse
from outrider.dialects.translate_errors import OVERFLOW_CODE, UpstreamProblem, openai_wording
from outrider.dialects.translate_reasoning import seal
from outrider.dialects.translate_stream import Act, Block, ChatAnswer, Kind, Piece, Step
from outrider.errors import EngineError
from outrider.types import Json

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ERROR_CODES = {429: "rate_limit_exceeded"}
# What a response may have and ours has not; under these names the engine means something else.
FIELDS = frozenset({
    "access_programs", "completed_at", "conversation", "image", "input_transformations", "moderation", "output_text",
    "prompt", "prompt_cache_diagnostics", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "tool_usage",
})  # fmt: skip


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> Json:
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def upstream_error(problem: UpstreamProblem) -> Json:
    return error_body(problem.status, openai_wording(problem), code=problem.code)


def from_chat(response: Json, state: ResponsesState) -> Json:
    """A plain answer. Raises `EngineError` for one that can't be taken for the model's."""
    answer = ChatAnswer(state.id, shows_ids=state.shows_ids)
    answer.whole(response)
    if answer.error or answer.problem:
        raise EngineError(answer.error or answer.problem)
    if answer.finish_reason is None:
        raise EngineError("the upstream's answer has no finish_reason")
    return _ended(answer, state, [_item(block, state, _status(block, answer)) for block in answer.blocks])


def conversation(state: ResponsesState, response: Json) -> list[Json]:
    """What a later request means that names `response`, the answer of `from_chat` or of a finished stream."""
    return [*state.items, *response["output"]]


class ResponsesStream:
    """Turns the chunks of one streamed answer into the events of the Responses API."""

    def __init__(self, state: ResponsesState, *, on_response: Callable[[Json], None] | None = None) -> None:
        """`on_response` gets the whole response once it is complete."""
        self._state = state
        self._answer = ChatAnswer(state.id, shows_ids=state.shows_ids)
        self._sequence = 0
        self._sent = (0, 0)
        """Number of events and of items before those of `finish`."""
        self._started = False
        self._ended = False
        self._items: list[Json] = []
        self._on_response = on_response
        self.failure = ""

    def start(self) -> list[bytes]:
        """The first two events; `feed` sends them by itself where they were not sent before."""
        if self._started:
            return []
        self._started = True
        response = _response(self._answer, self._state, "in_progress", [])
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def feed(self, chunk: Json) -> list[bytes]:
        """Events for one chunk; none where it holds nothing to show."""
        if self._ended:
            return []
        steps = self._answer.chunk(chunk)
        if self._answer.error:
            return self.fail(self._answer.error)
        return [*self.start(), *(event for step in steps for event in self._events(step))]

    def finish(self) -> list[bytes]:
        """The end of the stream was reached. It is a failure where the answer was not complete."""
        if self._ended:
            return []
        self._sent = (self._sequence, len(self._items))
        answer = self._answer
        steps = answer.end()
        if answer.problem:
            return self.fail(f"The upstream sent {answer.problem}.")
        if answer.finish_reason is None:
            return self.fail("The upstream's stream ended before its answer did.")
        events = [*self.start(), *(event for step in steps for event in self._events(step))]
        self._ended = True
        response = _ended(answer, self._state, self._items)
        if self._on_response is not None:
            self._on_response(response)
        return [*events, self._event(response["status"], response=response)]

    def fail(self, message: str, *, status: int = 500, code: str | None = None) -> list[bytes]:
        """The answer can't be completed: ``response.failed``, and nothing after it.

        Called after `finish`, it takes the place of the events that `finish` gave: those must not have been sent.
        """
        if self.failure:
            return []
        if self._ended:
            self._sequence = self._sent[0]
            del self._items[self._sent[1] :]
        self._answer.extras.clear()  # they may be what can't be told
        events = self.start()
        self._ended = True
        self.failure = message
        response = _response(self._answer, self._state, "failed", self._items)
        response["error"] = {"code": code or ERROR_CODES.get(status, "server_error"), "message": message}
        return [*events, self._event("failed", response=response)]

    def refuse(self, problem: UpstreamProblem) -> list[bytes]:
        """The events for a prompt that is too long; nothing for other problems, nor where no stream was asked for.

        As OpenAI does it: such a stream begins, tells of the error and fails. Codex makes its context shorter after
        these events alone, and gives up on an answer with status 400.
        """
        if problem.overflow is None or not self._state.stream:
            return []
        error = error_body(problem.status, openai_wording(problem), code=OVERFLOW_CODE, param="input")["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        begun = self.start()
        told = sse({"type": "error", "sequence_number": self._sequence, **fields, "error": error})
        self._sequence += 1
        return [*begun, told, *self.fail(error["message"], status=problem.status, code=OVERFLOW_CODE)]

    # -- events ----------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = sse({"type": f"response.{kind}", "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return event

    def _events(self, step: Step) -> list[bytes]:
        block = step.block
        at = {"item_id": _id(block, self._state), "output_index": block.index}
        if step.act is Act.OPEN:
            item = _item(block, self._state, "in_progress")
            added = self._event("output_item.added", output_index=block.index, item=item)
            return [added, *self._open(block, at)]
        if step.act is Act.ADD:
            return self._add(block, at, step.piece)
        item = _item(block, self._state, _status(block, self._answer))
        self._items.append(item)
        done = self._close(block, at, item)
        return [*done, self._event("output_item.done", output_index=block.index, item=item)]

    def _open(self, block: Block, at: Json) -> list[bytes]:
        if block.kind is Kind.CALL:
            return []
        empty = _part(Block(block.kind), self._state)
        if self._is_summary(block):
            return [self._event("reasoning_summary_part.added", **at, summary_index=0, part=empty)]
        return [self._event("content_part.added", **at, content_index=0, part=empty)]

    def _add(self, block: Block, at: Json, piece: Piece) -> list[bytes]:
        text = piece.text
        if block.kind is Kind.CALL:
            custom = self._state.tools.find(block.name).custom
            return [] if custom else [self._event("function_call_arguments.delta", **at, delta=text)]
        if self._is_summary(block):
            return [self._event("reasoning_summary_text.delta", **at, summary_index=0, delta=text)]
        if block.kind is Kind.REASONING:
            return [self._event("reasoning_text.delta", **at, content_index=0, delta=text)]
        if block.kind is Kind.REFUSAL:
            return [self._event("refusal.delta", **at, content_index=0, delta=text)]
        logprobs = _logprobs(piece.logprobs, self._state)
        return [self._event("output_text.delta", **at, content_index=0, delta=text, logprobs=logprobs)]

    def _close(self, block: Block, at: Json, item: Json) -> list[bytes]:
        if block.kind is Kind.CALL:
            return self._close_call(block, at, item)
        part = _part(block, self._state)
        if self._is_summary(block):
            return [
                self._event("reasoning_summary_text.done", **at, summary_index=0, text=part["text"]),
                self._event("reasoning_summary_part.done", **at, summary_index=0, part=part),
            ]
        at = at | {"content_index": 0}
        if block.kind is Kind.REASONING:
            done = self._event("reasoning_text.done", **at, text=part["text"])
        elif block.kind is Kind.REFUSAL:
            done = self._event("refusal.done", **at, refusal=part["refusal"])
        else:
            done = self._event("output_text.done", **at, text=part["text"], logprobs=part["logprobs"])
        return [done, self._event("content_part.done", **at, part=part)]

    def _close_call(self, block: Block, at: Json, item: Json) -> list[bytes]:
        if item["type"] == "custom_tool_call":  # its input is known only now that the JSON around it is whole
            text = item["input"]
            events = [self._event("custom_tool_call_input.delta", **at, delta=text)] if text else []
            return [*events, self._event("custom_tool_call_input.done", **at, input=text)]
        arguments = item["arguments"]
        events = []
        if arguments != block.text:
            events.append(self._event("function_call_arguments.delta", **at, delta=arguments))
        done = self._event("function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        return [*events, done]

    def _is_summary(self, block: Block) -> bool:
        return block.kind is Kind.REASONING and self._state.summaries


# -- parts of a response -----------------------------------------------------------------------------------------------


def _response(answer: ChatAnswer, state: ResponsesState, status: str, output: list[Json]) -> Json:
    own = {name: value for name, value in answer.extras.items() if name not in FIELDS}
    return {
        **own,
        "id": state.id,
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": state.model,
        "output": list(output),
        "usage": None,
        **state.echo,
    }


def _ended(answer: ChatAnswer, state: ResponsesState, output: list[Json]) -> Json:
    reason = INCOMPLETE.get(answer.finish_reason or "")
    response = _response(answer, state, "incomplete" if reason else "completed", output)
    if reason:
        response["incomplete_details"] = {"reason": reason}
    counts, completion = answer.counts, answer.output_tokens
    response["usage"] = {
        "input_tokens": counts.prompt or 0,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
        "total_tokens": (counts.prompt or 0) + completion,
    }
    return response


def _status(block: Block, answer: ChatAnswer) -> str:
    last = block.index == len(answer.blocks) - 1
    return "incomplete" if last and answer.finish_reason in INCOMPLETE else "completed"


def _id(block: Block, state: ResponsesState) -> str:
    """Item ids are made of the response's, so that they differ between responses and are the same in all events."""
    prefix = {Kind.REASONING: "rs", Kind.CALL: "fc"}.get(block.kind, "msg")
    if block.kind is Kind.CALL and state.tools.find(block.name).custom:
        prefix = "ctc"
    return f"{prefix}_{state.id.removeprefix('resp_')}{block.index:02x}"


def _item(block: Block, state: ResponsesState, status: str) -> Json:
    id = _id(block, state)
    opening = status == "in_progress"
    if block.kind is Kind.CALL:
        return _call_item(block, state, {"id": id, "status": status}, opening)
    if block.kind is not Kind.REASONING:
        content = [] if opening else [_part(block, state)]
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}
    item: Json = {"id": id, "type": "reasoning", "status": status, "summary": []}
    parts = [] if opening else [_part(block, state)]
    item["summary" if state.summaries else "content"] = parts
    if state.sealed_reasoning:
        item["encrypted_content"] = "" if opening else seal(block.text)
    return item


def _call_item(block: Block, state: ResponsesState, head: Json, opening: bool) -> Json:
    tool = state.tools.find(block.name)
    item = {**head, "call_id": block.call_id, "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    text = "" if opening else block.text
    if tool.custom:
        return {**item, "type": "custom_tool_call", "input": custom_input(text)}
    return {**item, "type": "function_call", "arguments": text if opening or text.strip() else "{}"}


def _part(block: Block, state: ResponsesState) -> Json:
    """The one part of a message or reasoning item, as far as its text has come."""
    if block.kind is Kind.REASONING:
        return {"type": "summary_text" if state.summaries else "reasoning_text", "text": block.text}
    if block.kind is Kind.REFUSAL:
        return {"type": "refusal", "refusal": block.text}
    logprobs = _logprobs(block.logprobs, state)
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


def _logprobs(entries: list[Json], state: ResponsesState) -> list[Json]:
    if not state.logprobs:
        return []
    return [
        _entry(entry) | {"top_logprobs": [_entry(top) for top in entry.get("top_logprobs") or ()]} for entry in entries
    ]


def _entry(entry: Json) -> Json:
    return {"token": entry.get("token") or "", "bytes": entry.get("bytes") or [], "logprob": entry.get("logprob")}
