"""What the dialects share that translate to and from chat completions.

A dialect turns its client's request into a `ChatTranslation` and the chat answer back into its own shape. Everything
here is pure: bytes and dicts in, bytes and dicts out.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

from outrider.errors import RequestError
from outrider.types import Json

CHAT_PATH = "/v1/chat/completions"

State = TypeVar("State")
LateSystem = Literal["system", "user"]

# Chat's own words for what the protocols translated here say otherwise, or can't be told in an answer.
NO_EXTENSIONS = frozenset({
    "messages", "n", "stream_options", "max_completion_tokens", "logprobs", "top_logprobs", "functions",
    "function_call", "modalities", "audio", "prompt", "echo", "suffix",
})  # fmt: skip

# What chat calls them; engines know three.
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTranslation(Generic[State]):
    """A client's request as a chat-completions request."""

    request: Json
    """The body to send upstream."""
    state: State
    """What the way back needs to know."""
    notes: tuple[str, ...] = ()
    """What was left out. Each starts with a short kind and a colon, so that notes can be counted."""


# -- fields of a request -----------------------------------------------------------------------------------------------


def bad(field: str, problem: str) -> RequestError:
    return RequestError(f"{field}: {problem}", param=field)


def want_object(value: Any, field: str) -> Json:
    if not isinstance(value, dict):
        raise bad(field, f"must be an object, not {_kind(value)}.")
    return value


def want_list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad(field, f"must be a list, not {_kind(value)}.")
    return value


def want_text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise bad(field, f"must be a string, not {_kind(value)}.")
    return value


def want_name(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad(field, f"must be a non-empty string, not {_kind(value)}.")
    return value


def want_number(value: Any, field: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(field, f"must be a number, not {_kind(value)}.")
    return value


def want_count(value: Any, field: str) -> int:
    """A positive whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad(field, f"must be a positive integer, not {value!r}.")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value == "":
        return "an empty string"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


# -- chat messages -----------------------------------------------------------------------------------------------------


def text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def image_part(url: str, detail: Any = None) -> Json:
    image = {"url": url}
    if detail in ("low", "high"):
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def file_part(data_url: str, name: Any = None) -> Json:
    return {"type": "file", "file": {"filename": name if isinstance(name, str) else "file", "file_data": data_url}}


def content_of(parts: list[Json]) -> str | list[Json]:
    """A chat message's content: a string wherever there is only text, since many templates take nothing else."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def tool_messages(call_id: str, parts: list[Json]) -> tuple[Json, list[Json]]:
    """A tool's result as a message of text, and those of its parts that must follow in a user message.

    Chat completions have no place for an image in a tool message.
    """
    texts = [part for part in parts if part["type"] == "text"]
    others = [part for part in parts if part["type"] != "text"]
    return {"role": "tool", "tool_call_id": call_id, "content": content_of(texts)}, others


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: Any, parameters: Json, *, strict: bool = False) -> Json:
    function: Json = {"name": name}
    if isinstance(description, str) and description:
        function["description"] = description
    function["parameters"] = parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def dumps(value: Any) -> str:
    """JSON with the spacing that models are used to write."""
    return json.dumps(value, ensure_ascii=False)


def join_head(messages: list[Json]) -> list[Json]:
    """`messages` with the system messages at their head made one: many templates look at the first only."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "system":
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count] if message["content"])
    return [{"role": "system", "content": text}, *messages[count:]]


def place_late_system(messages: list[Json], late_system: LateSystem) -> list[Json]:
    """Keep each system message where it stands, so that one turn's messages are a prefix of the next turn's.

    Templates that refuse a system message after the first get it as a user message that is marked as the system's.
    """
    if late_system == "system":
        return messages
    head = messages[:1]
    for message in messages[1:]:
        if message["role"] == "system":
            message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
        head.append(message)
    return head


def carry_extensions(body: Json, request: Json, *, spoken: Collection[str], unspoken: Collection[str]) -> list[str]:
    """Put into `request` the fields of `body` that its protocol doesn't know: clients send them for the engine.

    The protocol knows those that are translated (`spoken`) and others (`unspoken`). Returns notes of what is left out.
    """
    notes = []
    for name, value in body.items():
        if name in spoken:
            continue
        if name not in unspoken and name not in NO_EXTENSIONS and name not in request:
            request[name] = value
        elif value:
            notes.append(f"field: {name}")
    return notes


def ask_for_effort(config: Any, request: Json) -> None:
    """`config` is where a protocol has its ``effort``."""
    effort = config.get("effort") if isinstance(config, dict) else None
    if isinstance(effort, str) and effort in EFFORTS:
        request["reasoning_effort"] = EFFORTS[effort]


def ask_for_stream(request: Json) -> None:
    request["stream"] = True
    request["stream_options"] = {"include_usage": True}


def rough_tokens(body: bytes) -> int:
    """About how many tokens a request has, where nobody counted: four bytes each. For progress displays."""
    return max(1, len(body) // 4)


# -- server-sent events ------------------------------------------------------------------------------------------------


def sse(event: Json) -> bytes:
    """A named event; both protocols name it after the ``type`` of its data."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))
