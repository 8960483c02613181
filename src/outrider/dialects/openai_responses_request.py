"""From an OpenAI Responses request to a chat-completions request.

What has no counterpart there (`UNSPOKEN`; tools, items and parts that only OpenAI's servers can act on) is left out and
noted. Fields that OpenAI doesn't know are meant for the engine, and go to it as they are.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from outrider.dialects.openai_responses_history import PREFIX, ResponseHistory, resolved
from outrider.dialects.openai_responses_items import Messages
from outrider.dialects.openai_responses_tools import ToolTable
from outrider.dialects.translate import (
    ChatTranslation,
    LateSystem,
    ask_for_effort,
    ask_for_stream,
    bad,
    carry_extensions,
    join_head,
    place_late_system,
    want_count,
    want_list,
    want_name,
    want_number,
    want_object,
    want_text,
)
from outrider.errors import RequestError
from outrider.types import Json

SEALED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

# All fields that OpenAI knows: those that are translated, and those that are for OpenAI's own servers. Chat has some of
# the latter too, but providers that speak nothing else refuse them; and Codex has one of its own.
SPOKEN = frozenset({
    "background", "conversation", "include", "input", "instructions", "max_output_tokens", "model",
    "parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "store", "stream", "temperature", "text",
    "tool_choice", "tools", "top_logprobs", "top_p",
})  # fmt: skip
UNSPOKEN = frozenset({
    "access_programs", "background_options", "client_metadata", "context_management", "image", "max_tool_calls",
    "metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "stream_options", "truncation", "user",
})  # fmt: skip

# Fields of the request that the response repeats, with what they are where the client left them out.
ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesState:
    """What the way back needs of a Responses request."""

    id: str
    """Of the answer: `PREFIX` and more."""
    model: str
    tools: ToolTable
    stream: bool = False
    sealed_reasoning: bool = False
    """The client keeps reasoning for us, in ``encrypted_content``."""
    summaries: bool = False
    """The client wants reasoning as a summary, else as the reasoning's own text."""
    logprobs: bool = False
    shows_ids: bool = False
    """The client itself asked for token ids."""
    echo: Json
    """What the response repeats of the request."""
    items: tuple[Json, ...] = ()
    """The conversation up to this answer, as input items."""
    previous: str = ""
    """The response that it goes on from; its conversation is the first `inherited` items."""
    inherited: int = 0
    history: ResponseHistory | None = None
    """Where the answer is kept, for a later request that names it; None where it is not to be."""


def to_chat(
    body: Json, *, id: str = "", history: ResponseHistory | None = None, late_system: LateSystem = "system"
) -> ChatTranslation[ResponsesState]:
    """Translate a body of ``POST /v1/responses``. The answer's `id` is made up where none is given.

    Raises `RequestError` naming the field that is wrong.
    """
    for name in ("background", "conversation", "prompt"):
        if body.get(name):
            raise bad(name, "is not supported here: no conversations, prompts or jobs are stored.")
    items, inherited = _items(body, history)
    tools = ToolTable()
    tools.add(body.get("tools") or [], "tools")
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            tools.add(item.get("tools") or [], f"input.{index}.tools")
    messages = Messages(tools)
    if body.get("instructions"):
        instructions = want_text(body["instructions"], "instructions")
        messages.add({"role": "system", "content": instructions}, "instructions")
    for index, item in enumerate(items):
        messages.add(item, f"input.{index}")
    found = messages.result()
    if not found:
        raise bad("input", "holds no message.")
    model = want_name(body.get("model"), "model")
    request: Json = {"model": model, "messages": place_late_system(join_head(found), late_system)}
    notes = [*tools.notes, *messages.notes]
    if tools.functions:
        request["tools"] = tools.functions
        notes += _tool_choice(body, request, tools)
    _parameters(body, request)
    _format(body, request)
    include = want_list(body.get("include") or [], "include")
    if LOGPROBS in include or body.get("top_logprobs"):
        request["logprobs"] = True
        if body.get("top_logprobs"):
            request["top_logprobs"] = body["top_logprobs"]
    notes += carry_extensions(body, request, spoken=SPOKEN, unspoken=UNSPOKEN)
    if body.get("stream") is True:
        ask_for_stream(request)
    reasoning = body.get("reasoning")
    state = ResponsesState(
        id=id or PREFIX + uuid.uuid4().hex,
        model=model,
        tools=tools,
        stream=body.get("stream") is True,
        sealed_reasoning=SEALED_REASONING in include,
        summaries=isinstance(reasoning, dict) and bool(reasoning.get("summary")),
        logprobs="logprobs" in request,
        shows_ids=body.get("return_token_ids") is True,
        echo={name: default if body.get(name) is None else body[name] for name, default in ECHOED.items()},
        items=tuple(items),
        previous=body["previous_response_id"] if inherited else "",
        inherited=inherited,
        history=history if body.get("store") is not False else None,
    )
    return ChatTranslation(request=request, state=state, notes=tuple(notes))


def _items(body: Json, history: ResponseHistory | None) -> tuple[list[Any], int]:
    """The conversation, and how many of its items are those of an earlier response."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = resolved(want_list(given, "input"), history)
    previous = body.get("previous_response_id")
    if previous is None:
        return items, 0
    before = history.items(want_name(previous, "previous_response_id")) if history is not None else None
    if before is None:
        raise RequestError(
            f"Previous response with id '{previous}' not found.",
            status=404,
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return [*before, *items], len(before)


def _tool_choice(body: Json, request: Json, tools: ToolTable) -> list[str]:
    choice = body.get("tool_choice")
    if body.get("parallel_tool_calls") is not None:
        request["parallel_tool_calls"] = body["parallel_tool_calls"] is True
    if choice is None:
        return []
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise bad("tool_choice", f"must be auto, none, required or an object, not {choice!r}.")
        request["tool_choice"] = choice
        return []
    kind = want_object(choice, "tool_choice").get("type")
    if kind == "allowed_tools":
        allowed = want_list(choice.get("tools"), "tool_choice.tools")
        request["tool_choice"] = "required" if choice.get("mode") == "required" else "auto"
        if len(allowed) != 1 or request["tool_choice"] == "auto":
            return ["tool_choice: allowed_tools, where chat can only force one"]
        choice = want_object(allowed[0], "tool_choice.tools.0")
        kind = choice.get("type")
    if kind not in ("function", "custom"):
        return [f"tool_choice: {kind}"]
    name = tools.name_of(choice.get("name"), choice.get("namespace"), where="tool_choice")
    if all(tool["function"]["name"] != name for tool in tools.functions):
        raise bad("tool_choice.name", f"there is no tool {choice.get('name')!r} in tools.")
    request["tool_choice"] = {"type": "function", "function": {"name": name}}
    return []


def _parameters(body: Json, request: Json) -> None:
    if body.get("max_output_tokens") is not None:
        request["max_tokens"] = want_count(body["max_output_tokens"], "max_output_tokens")
    for name in ("temperature", "top_p"):
        if body.get(name) is not None:
            request[name] = want_number(body[name], name)
    ask_for_effort(body.get("reasoning"), request)


def _format(body: Json, request: Json) -> None:
    text = body.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    if wanted is None:
        return
    kind = want_object(wanted, "text.format").get("type")
    if kind == "json_schema":
        schema = {name: wanted[name] for name in ("name", "description", "schema", "strict") if wanted.get(name)}
        want_name(schema.get("name"), "text.format.name")
        want_object(schema.get("schema"), "text.format.schema")
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind == "json_object":
        request["response_format"] = {"type": "json_object"}
    elif kind != "text":
        raise bad("text.format.type", f"must be text, json_object or json_schema, not {kind!r}.")
