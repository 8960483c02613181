"""The answers in a chat reply that an engine made, as the agent was told them: a body, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from outrider.gateway.continuation.meaning import REASONING_FIELDS, NotText, plain_messages
from outrider.types import Json


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []


_reply = msgspec.json.Decoder(_Reply)


def told_answers(response: bytes) -> dict[int, Json]:
    """Messages in the shape of `plain_messages`, by index of their choice; those that can't be read are left out."""
    made: dict[int, Json] = {}
    try:
        for choice in _choices(response):
            _add(made.setdefault(choice.index, {"role": "assistant", "content": ""}), choice)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    plain: dict[int, Json] = {}
    for index, message in made.items():
        try:
            (plain[index],) = plain_messages([message])
        except (NotText, ValueError):
            continue
    return plain


def _choices(response: bytes) -> Iterator[_Choice]:
    if response.lstrip().startswith(b"{"):
        yield from _reply.decode(response).choices
        return
    for line in response.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data.startswith(b"{"):
            yield from _reply.decode(data).choices


def _add(message: Json, choice: _Choice) -> None:
    for part in (choice.message, choice.delta):
        if part is None:
            continue
        message["content"] += part.content or ""
        reasoning = next((text for name in REASONING_FIELDS if (text := getattr(part, name))), None)
        if reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
        for number, call in enumerate(part.tool_calls or ()):
            _add_call(message.setdefault("tool_calls", []), call, number if choice.message is not None else call.index)


def _add_call(calls: list[Json], call: _Call, at: int) -> None:
    another = at < len(calls) and call.id and calls[at]["id"] not in ("", call.id)  # engines have sent two as one
    if at >= len(calls) or another:
        calls.append({"id": call.id or "", "type": "function", "function": {"name": "", "arguments": ""}})
        at = len(calls) - 1
    function = calls[at]["function"]
    function["name"] = function["name"] or call.function.name or ""
    function["arguments"] += call.function.arguments or ""
