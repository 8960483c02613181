"""What a request asked for, read off its body, whatever protocol it is in: enough to tell auxiliary calls apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from outrider.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request."""

    system: str = ""
    """All system and developer messages, one a line."""
    first_user: str = ""
    """Text of the first user message."""
    tools: bool = False
    """It offers tools."""
    max_tokens: int | None = None
    answers: int = 0
    """Answers of the model in its history: the turn it is, less one."""
    schema: bool = False
    """It wants JSON that follows a schema."""


def asked(call: Call) -> Asked:
    """Read the body of `call`. One that is no JSON object gives the defaults."""
    try:
        body = msgspec.json.decode(call.request)
    except msgspec.DecodeError:
        return Asked()
    if not isinstance(body, dict):
        return Asked()
    items = list(_items(body))
    system = [_text(body.get("system")), _text(body.get("instructions"))]
    system += [_text(item.get("content")) for item in items if item.get("role") in ("system", "developer")]
    users = (_text(item.get("content")) for item in items if item.get("role") == "user")
    limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    return Asked(
        system="\n".join(text for text in system if text),
        first_user=next((text for text in users if text), ""),
        # Codex puts its tools into the input.
        tools=bool(body.get("tools")) or any(item.get("type") == "additional_tools" for item in items),
        max_tokens=next((limit for limit in limits if isinstance(limit, int)), None),
        answers=_answers(items),
        schema=_wants_schema(body),
    )


def _items(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Messages, or the input items of the Responses API, or the prompt of a plain completion as a user's message."""
    messages = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(messages, str):
        yield {"role": "user", "content": messages}
    elif isinstance(messages, list):
        yield from (item for item in messages if isinstance(item, dict))


def _answers(items: list[dict[str, Any]]) -> int:
    """Runs of items that the model made: the Responses API has one item for each call of a tool, of the same answer."""
    made = [
        item.get("role") == "assistant" or item.get("type") in ("function_call", "custom_tool_call", "reasoning")
        for item in items
    ]
    return sum(now and not before for before, now in zip([False, *made], made, strict=False))


def _text(content: Any) -> str:
    """A string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def _wants_schema(body: dict[str, Any]) -> bool:
    """In the words of chat completions, of the Responses API and of Anthropic's."""
    text, output = body.get("text"), body.get("output_config")
    wanted = (
        body.get("response_format"),
        text.get("format") if isinstance(text, dict) else None,
        output.get("format") if isinstance(output, dict) else None,
    )
    return any(isinstance(form, dict) and form.get("type") == "json_schema" for form in wanted)
