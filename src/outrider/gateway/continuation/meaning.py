"""What a chat request means, apart from how it is written.

Harnesses don't send back an answer as they got it: arguments come with other spaces, escapes, key order and number
forms, text as a string or as a list of blocks, `cache_control` moves, null turns into "". None of that is a difference.
A trailing space, another image or another argument is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outrider.types import Json

# Claude Code puts such a line, different in each request, before its system prompt; it says nothing to a model.
BILLING_HEADER = "x-anthropic-billing-header:"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_NONE = b""

_encode = msgspec.json.Encoder(order="sorted").encode


class NotText(Exception):
    """A message holds what no chat template here can write: an image, a sound, a file. The text says which."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One message as digests, 16 bytes each: equal where the messages mean the same in the same place."""

    role: str
    text: bytes
    reasoning: bytes
    calls: bytes
    digest: bytes
    """Of everything."""


@dataclass(frozen=True, slots=True)
class Talk:
    """The messages of a request, read."""

    meanings: tuple[Meaning, ...]
    chain: tuple[bytes, ...]
    """``chain[i]`` stands for the head and the first ``i`` messages together."""


def digest(*parts: Any) -> bytes:
    return hashlib.blake2b(_encode(parts), digest_size=16).digest()


def read_talk(head: bytes, messages: Sequence[Json]) -> Talk:
    """`head` stands for tools and options. `messages` are plain ones, as `plain_messages` makes them."""
    meanings: list[Meaning] = []
    chain = [head]
    links: dict[str, list[int]] = {}  # a call's own id says nothing; which call a result belongs to does
    for position, message in enumerate(messages):
        found = meaning_of(message, links, position)
        meanings.append(found)
        chain.append(follow(chain[-1], found))
    return Talk(tuple(meanings), tuple(chain))


def follow(chain: bytes, meaning: Meaning) -> bytes:
    return hashlib.blake2b(chain + meaning.digest, digest_size=16).digest()


def meaning_of(message: Json, links: dict[str, list[int]], position: int) -> Meaning:
    role = message["role"]
    text = digest(message["content"])
    reasoning = digest(message["reasoning_content"]) if message.get("reasoning_content") else _NONE
    calls = _NONE
    if message.get("tool_calls"):
        found = [_call(call) for call in message["tool_calls"]]
        calls = digest(found)
        for number, call in enumerate(message["tool_calls"]):
            links[call["id"]] = [position, number]
    link: Any = None
    if "tool_call_id" in message:
        link = links.get(message["tool_call_id"], message["tool_call_id"])
    name = message.get("name") if role != "assistant" else None
    parts = b"".join((text, reasoning, b"|", calls))
    whole = hashlib.blake2b(_encode((role, name, link)) + parts, digest_size=16).digest()
    return Meaning(role, text, reasoning, calls, whole)


def plain_messages(messages: Sequence[Any], joint: str = "\n") -> list[Json]:
    """Chat messages with one shape: the content a string, reasoning under one name, nothing that says nothing.

    `joint` stands between the text parts of one message. Raises `NotText`, and `ValueError` where a message is none.
    """
    found = [_plain(message, joint) for message in messages]
    if found and found[0]["role"] in ("system", "developer"):
        text = without_billing_header(found[0]["content"])
        if not text and found[0]["content"]:
            return found[1:]  # there was nothing else in it
        found[0]["content"] = text
    return found


def _plain(message: Any, joint: str) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("each message must be an object with a role")
    role = message["role"]
    plain: Json = {"role": role, "content": _text(message.get("content"), joint)}
    if role == "assistant":
        reasoning = next((text for name in REASONING_FIELDS if (text := _text_or_none(message.get(name)))), None)
        if reasoning and reasoning.strip():
            plain["reasoning_content"] = reasoning.strip()
        calls = message.get("tool_calls")
        if calls:
            plain["tool_calls"] = [_plain_call(call) for call in calls]
    else:
        for name in ("name", "tool_call_id"):
            if isinstance(message.get(name), str):
                plain[name] = message[name]
    return plain


def without_billing_header(text: str) -> str:
    line, _, rest = text.partition("\n")
    return rest if line.startswith(BILLING_HEADER) else text


def _plain_call(call: Any) -> Json:
    if not isinstance(call, dict):
        raise ValueError("each tool call must be an object")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("each tool call must have a function with a name")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call_id = call.get("id") if isinstance(call.get("id"), str) else ""
    return {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _text(content: Any, joint: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise ValueError("the content of a message must be a string or a list of parts")
    return joint.join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    raise NotText(str(part.get("type")) if isinstance(part, dict) else "no text")


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _call(call: Json) -> Any:
    return call["function"]["name"], canonical_arguments(call["function"]["arguments"])


def canonical_arguments(arguments: str) -> Any:
    """Equal for texts that parse to equal values; in a list, the text itself where it is no JSON object."""
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
        if not isinstance(parsed, dict):
            return [arguments]
        value = _numbers(parsed)
        _encode(value)
    except (ValueError, RecursionError):  # no JSON, or half a surrogate, which JSON allows and UTF-8 does not
        return [arguments]
    return value


def _numbers(value: Any) -> Any:
    """1.0 is 1. Numbers that the digest's encoder has no form for get one that no JSON text is likely to hold."""
    if isinstance(value, float):
        if value.is_integer():
            return _numbers(int(value))
        return value if math.isfinite(value) else {"\0number": repr(value)}
    if isinstance(value, int) and abs(value) >= 2**63:
        return {"\0number": str(value)}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    if isinstance(value, dict):
        return {key: _numbers(one) for key, one in value.items()}
    return value
