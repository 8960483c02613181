"""Chat messages as a template takes them: what the wire has as text made a mapping, what a template lacks written out.

Nothing here touches recorded tokens. A template sees a history only where a branch is opened; a branch that goes on
keeps the ids that were sampled.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.renderers.chat_template import ChatTemplate, TemplateRefused
from outrider.renderers.encoding import TokenText
from outrider.types import Json

_CALL_OPEN, _CALL_CLOSE = "<tool_call>\n", "\n</tool_call>"
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>\n", "\n</tool_response>"
STUB_TOOL: Json = {
    "type": "function",
    "function": {"name": "stub", "description": "", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a chat template can do, found by trying."""

    calls: bool
    """It writes out an assistant's tool calls."""
    results: bool
    """It takes messages with the role ``tool``."""
    late_system: bool
    """It takes a system message after the first."""
    tools: bool
    """It writes out the tools."""
    reasoning: bool
    """It writes out an assistant's reasoning."""


def probe(template: ChatTemplate) -> Traits:
    mark = "probe" + secrets.token_hex(8)
    user = {"role": "user", "content": "u"}
    call = {"role": "assistant", "content": "", "tool_calls": [stub_call(mark, {"k": "v"})]}
    result = {"role": "tool", "tool_call_id": "call00000", "name": mark, "content": mark + "-result"}
    answer = {"role": "assistant", "content": "a"}
    thought = {"role": "assistant", "content": "a", "reasoning_content": mark}
    late = [user, answer, {"role": "system", "content": mark}, user]
    named = {**STUB_TOOL, "function": {**STUB_TOOL["function"], "name": mark}}
    calls = _shows(template, mark, [user, call], [STUB_TOOL])
    return Traits(
        calls=calls,
        results=_shows(template, mark + "-result", [user, call if calls else answer, result], [STUB_TOOL]),
        late_system=_shows(template, mark, late),
        tools=_shows(template, mark, [user], [named]),
        reasoning=_shows(template, mark, [user, thought]),
    )


def stub_call(name: str, arguments: Json, call_id: str = "call00000") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def shape(messages: Sequence[Json], text: TokenText, traits: Traits) -> list[Json]:
    """`messages` (content a string each) for the template, with control tokens' spellings broken."""
    shaped: list[Json] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            shaped.append(_assistant(message, text, traits))
        elif role in ("tool", "function") and not traits.results:
            _append_result(shaped, text.guard(message["content"]))
        elif role in ("system", "developer") and shaped and not traits.late_system:
            shaped.append({"role": "user", "content": f"<system>\n{text.guard(message['content'])}\n</system>"})
        else:
            made = {**message, "role": "system" if role == "developer" else role}
            made["content"] = text.guard(message["content"])
            shaped.append(made)
    return shaped


def shape_tools(tools: Sequence[Json] | None, text: TokenText) -> list[Json] | None:
    return [_guard_all(tool, text) for tool in tools] if tools else None


def _assistant(message: Json, text: TokenText, traits: Traits) -> Json:
    # Reasoning and call markers in what the model itself said are its own; only the ends of turns are not.
    content = text.guard(message["content"], only_control=True)
    made: Json = {"role": "assistant", "content": content}
    if message.get("reasoning_content"):
        made["reasoning_content"] = text.guard(message["reasoning_content"], only_control=True)
    calls = message.get("tool_calls")
    if calls and traits.calls:
        made["tool_calls"] = [_call(call, text) for call in calls]
    elif calls:
        written = [_CALL_OPEN + _written(call["function"], text) + _CALL_CLOSE for call in calls]
        made["content"] = "\n".join([content, *written] if content else written)
    return made


def _append_result(shaped: list[Json], content: str) -> None:
    """Results that follow each other are one turn of the user's."""
    body = _RESULT_OPEN + content + _RESULT_CLOSE
    if shaped and shaped[-1].get("results"):
        shaped[-1]["content"] += "\n" + body
    else:
        shaped.append({"role": "user", "content": body, "results": True})


def _call(call: Json, text: TokenText) -> Json:
    """Arguments that are a JSON object become a mapping; others stay the text they are."""
    function = {**call["function"], "arguments": _guard_all(mapping(call["function"].get("arguments")), text)}
    return {**call, "function": function}


def mapping(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _written(function: Json, text: TokenText) -> str:
    arguments = function.get("arguments")
    body = arguments if isinstance(arguments, str) and arguments.strip() else json.dumps(arguments or {})
    name = json.dumps(function["name"], ensure_ascii=False)
    return text.guard(f'{{"name": {name}, "arguments": {body}}}', only_control=True)


def _guard_all(value: Any, text: TokenText) -> Any:
    if isinstance(value, str):
        return text.guard(value)
    if isinstance(value, dict):
        return {text.guard(key): _guard_all(one, text) for key, one in value.items()}
    if isinstance(value, list):
        return [_guard_all(one, text) for one in value]
    return value


def _shows(template: ChatTemplate, mark: str, messages: Sequence[Json], tools: Sequence[Json] | None = None) -> bool:
    try:
        return mark in template.render(messages, tools, {}, generate=False)
    except TemplateRefused:
        return False
