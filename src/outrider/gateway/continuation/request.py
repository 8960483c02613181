"""A chat request taken apart: what its prompt is made of, and the completions request that sends the prompt as ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outrider.errors import RequestError
from outrider.gateway.continuation.meaning import NotText, plain_messages
from outrider.types import Json

COMPLETIONS_PATH = "/v1/completions"
_DEFAULT_LOGPROBS = 1  # some engines take 0 for none

# Parts of the prompt, or chat's own words for what completions call otherwise.
_CHAT_ONLY = frozenset({
    "messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "reasoning_effort", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "modalities", "audio", "prediction", "include_reasoning", "documents",
    "return_token_ids", "add_special_tokens", "web_search_options", "verbosity",
})  # fmt: skip

LEFT = "engine: "  # begins `Call.continuation` of what is left to the engine
FORCED = "a forced tool call"
BEGUN = "an answer begun by the agent"
_SPELLED = "the request spells control tokens"
_CONTROL = re.compile(rb"<\|[a-z_]+\|>")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Json).decode


class LeftToEngine(Exception):
    """The prompt can't be made here; the text says why, in a few words that can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What an agent asks for, in the words of chat completions."""

    fields: Json
    messages: list[Json]
    """As `plain_messages` makes them."""
    tools: list[Json]
    options: Json
    parses_calls: bool
    """Tool calls are looked for in the answer."""
    forced: frozenset[str]
    """Names of tools of which the agent wants one called, whatever else the model would say; empty where it does not.
    """
    begun: str
    """The beginning of the answer, where the agent has written it. It is none of `messages`."""
    stop: tuple[str, ...]
    keeps_stop: bool
    """The stop string that ends an answer is shown as a part of it."""
    stream: bool
    top_logprobs: int | None
    """None where the agent did not ask for log-probs."""
    shows_ids: bool
    """The agent itself asked for token ids."""


def read_chat(
    body: bytes,
    *,
    shows_ids: bool,
    shows_logprobs: bool,
    joint: str = "\n",
    frees_calls: bool = True,
    answered: bool = False,
) -> ChatRequest:
    """Raises `LeftToEngine`, and `RequestError` where no engine could do better.

    `joint` stands between the text parts of one message. `frees_calls`: a call that is forced is sampled as any other
    answer. `answered`: the engine has made the prompt and the answer, and the ids of both are known.
    """
    fields = _fields(body)
    choice, given = fields.get("tool_choice"), fields.get("tools")
    tools = [tool for tool in given if isinstance(tool, dict)] if isinstance(given, list) else []
    if fields.get("functions") and not answered:
        raise LeftToEngine("functions in place of tools")
    forced = _forced(choice, tools)
    if forced is None or (forced and not frees_calls):
        if not answered:
            raise LeftToEngine(FORCED)  # engines force it by a grammar, which no prompt can do
        forced = frozenset()
    messages, begun = _messages(fields, joint)
    stop = fields.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(one for one in stop or () if isinstance(one, str))
    return ChatRequest(
        fields=fields,
        messages=messages,
        tools=tools,
        options=_options(fields),
        parses_calls=bool(tools) and choice != "none",
        forced=forced,
        begun=begun,
        stop=tuple(one for one in stops if one),
        keeps_stop=fields.get("include_stop_str_in_output") is True,
        stream=fields.get("stream") is True,
        top_logprobs=int(fields.get("top_logprobs") or 0) if shows_logprobs else None,
        shows_ids=shows_ids,
    )


def completions_body(request: ChatRequest, prompt_ids: Sequence[int]) -> bytes:
    """The same sampling over `prompt_ids`, with token ids and log-probs asked for."""
    fields = request.fields
    body = {name: value for name, value in fields.items() if name not in _CHAT_ONLY}
    limit = fields.get("max_completion_tokens")
    # Null where the agent set no limit: left out, completions would stop after 16 tokens.
    body["max_tokens"] = limit if limit is not None else fields.get("max_tokens")
    body["logprobs"] = max(request.top_logprobs or 0, _DEFAULT_LOGPROBS)
    body["return_token_ids"] = True
    body["prompt"] = prompt_ids
    return _encode(body)


def left_to_engine(why: str, body: bytes) -> str:
    """`Call.continuation` of a call whose prompt the engine makes: why, and whether it might read control tokens from
    the agent's text."""
    reasons = [why] if why else []
    if _CONTROL.search(body) is not None:
        reasons.append(_SPELLED)
    return LEFT + "; ".join(reasons) if reasons else ""


def _forced(choice: Any, tools: Sequence[Json]) -> frozenset[str] | None:
    """Names of the tools of which one must be called, by `tool_choice`; None where it is not known to name any."""
    offered = _names(tools)
    if choice == "required":
        return offered or None
    if not isinstance(choice, dict):
        return frozenset()
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or allowed.get("mode") != "required":
            return frozenset()
        named = _names(allowed.get("tools"))
    else:
        named = _names([choice])
    return named & offered or None


def _names(tools: Any) -> frozenset[str]:
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return frozenset(name for name in names if isinstance(name, str))


def _messages(fields: Json, joint: str) -> tuple[list[Json], str]:
    """Those before the answer, and how the agent has begun that. Raises `LeftToEngine`, and `RequestError`."""
    try:
        messages = plain_messages(fields.get("messages") or (), joint)
    except NotText as error:
        raise LeftToEngine(f"content of type {error}") from None
    except ValueError as error:
        raise RequestError(f"messages: {error}.", param="messages") from None
    if not messages:
        raise RequestError("messages: there must be at least one.", param="messages")
    if not fields.get("continue_final_message"):
        if fields.get("add_generation_prompt") is False:
            raise LeftToEngine(BEGUN)
        return messages, ""
    *before, last = messages
    if not before or last["role"] != "assistant" or not last["content"] or last.keys() != {"role", "content"}:
        raise LeftToEngine(BEGUN)
    return before, last["content"]


def _fields(body: bytes) -> Json:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"The request body could not be read: {error}.") from None


def _options(fields: Json) -> Json:
    given: Any = fields.get("chat_template_kwargs")
    options: Json = dict(given) if isinstance(given, dict) else {}
    if fields.get("reasoning_effort") is not None:
        options.setdefault("reasoning_effort", fields["reasoning_effort"])
    return options
