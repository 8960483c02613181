"""Calls as a conversation: what was new in each request, and what came back.

Reads the wire bodies of the common chat protocols with patience and for display only; training never does. Whatever
it does not know is shown as it came. Nothing here is cleaned or escaped: that is up to whoever shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.types import Call, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call: the messages that no earlier call had shown, and the replies (several if ``n`` was)."""

    call: Call
    new: tuple[Message, ...]
    replies: tuple[Message, ...]
    repeated: int
    """Messages of the request that continue an earlier call and are left out of `new`."""
    continues: int | None
    """Position of the call it continues, None for a first call or a new branch."""


def turns(calls: Sequence[Call]) -> list[Turn]:
    """The calls of one attempt, each reduced to what it adds to an earlier one."""
    shown: list[list[Message]] = []
    found = []
    for call in calls:
        request, replies = request_messages(call.request), reply_messages(call.response)
        repeated, continues = 0, None
        for index, branch in enumerate(shown):
            length = _common(branch, request)
            if length > repeated:
                repeated, continues = length, index
        found.append(
            Turn(call=call, new=tuple(request[repeated:]), replies=replies, repeated=repeated, continues=continues)
        )
        shown.append([*request, *replies[:1]])
    return found


def request_messages(body: bytes) -> list[Message]:
    """The messages of a request body: chat messages, a prompt, or the whole body where it is neither."""
    request = _parse(body)
    if not isinstance(request, dict):
        return [Message(role="request", text=_decode(body))] if body else []
    messages = []
    for key in ("system", "instructions"):
        if request.get(key):
            messages.append(Message(role="system", text=content_text(request[key])))
    listed = request.get("messages", request.get("input", request.get("prompt")))
    if isinstance(listed, str):
        messages.append(Message(role="user" if "input" in request else "prompt", text=listed))
    elif isinstance(listed, list) and listed and all(isinstance(item, int) for item in listed):
        messages.append(Message(role="prompt", text=f"[{len(listed)} token ids]"))
    elif isinstance(listed, list):
        messages += [_message(item, "prompt") for item in listed]
    else:
        messages.append(Message(role="request", text=_decode(body)))
    return messages


def reply_messages(body: bytes) -> tuple[Message, ...]:
    """The replies in a response body, JSON or an event stream; the body itself where it is neither."""
    if not body.strip():
        return ()
    response = _parse(body)
    found = list(_whole_replies(response)) if isinstance(response, dict) else _streamed_replies(body)
    return tuple(found) if found else (Message(role="response", text=_decode(body)),)


def content_text(content: Any) -> str:
    """Text of a message's content: a string, or parts, of which those that are no text are named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, (_part_text(part) for part in content)))
    return json.dumps(content, ensure_ascii=False)


def _message(item: Any, role: str) -> Message:
    if not isinstance(item, dict):
        return Message(role=role, text=content_text(item))
    texts = [str(item[key]) for key in ("reasoning_content", "reasoning") if isinstance(item.get(key), str)]
    texts.append(content_text(item.get("content")) if "content" in item else "")
    if "content" not in item and item.get("type"):
        texts.append(_part_text(item))
    texts += [_tool_call(call) for call in _dicts(item.get("tool_calls"))]
    return Message(role=str(item.get("role") or item.get("type") or role), text="\n".join(filter(None, texts)))


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return content_text(part)
    kind = str(part.get("type", ""))
    for key in ("text", "thinking", "output"):
        if isinstance(part.get(key), str):
            return str(part[key])
    if kind in ("tool_use", "function_call"):
        return _tool_call(part)
    if kind == "tool_result":
        return content_text(part.get("content"))
    return f"[{kind or 'part'}]"


def _tool_call(call: Json) -> str:
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments", source.get("input", ""))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f"→ {source.get('name', '?')}({arguments})"


def _whole_replies(response: Json) -> Iterator[Message]:
    for choice in _dicts(response.get("choices")):
        yield _message(choice.get("message") or {"role": "assistant", "content": choice.get("text")}, "assistant")
    if response.get("content") is not None:
        yield Message(role="assistant", text=content_text(response["content"]))
    for item in _dicts(response.get("output")):
        yield _message(item, "assistant")
    error = response.get("error")
    if error:
        yield Message(role="error", text=str(error.get("message", error)) if isinstance(error, dict) else str(error))


@dataclass(slots=True)
class _Draft:
    """A streamed reply that grows by deltas."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def call(self, index: Any, name: Any, arguments: Any) -> None:
        call = self.calls.setdefault(index if isinstance(index, int) else 0, {"name": "", "arguments": ""})
        call["name"] += name if isinstance(name, str) else ""
        call["arguments"] += arguments if isinstance(arguments, str) else ""

    def message(self) -> Message:
        calls = [_tool_call(dict(self.calls[index])) for index in sorted(self.calls)]
        return Message(role="assistant", text="\n".join(filter(None, [self.reasoning, self.content, *calls])))


def _streamed_replies(body: bytes) -> list[Message]:
    """Put the deltas of an event stream together, by choice index."""
    drafts: dict[int, _Draft] = {}
    whole: list[Message] = []
    for event in _events(body):
        if event.get("type") == "response.completed" and isinstance(event.get("response"), dict):
            whole += _whole_replies(event["response"])
        if event.get("error"):
            whole += _whole_replies({"error": event["error"]})
        for choice in _dicts(event.get("choices")):
            index = choice.get("index")
            _add_choice(drafts.setdefault(index if isinstance(index, int) else 0, _Draft()), choice)
        if str(event.get("type", "")).startswith("content_block_"):
            _add_block(drafts.setdefault(0, _Draft()), event)
    return [drafts[index].message() for index in sorted(drafts)] + whole


def _add_choice(draft: _Draft, choice: Json) -> None:
    """A chunk of the chat or completions protocol."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        delta = {"content": choice.get("text")}
    draft.reasoning += str(delta.get("reasoning_content") or delta.get("reasoning") or "")
    draft.content += str(delta.get("content") or "")
    for call in _dicts(delta.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, dict):
            draft.call(call.get("index"), function.get("name"), function.get("arguments"))


def _add_block(draft: _Draft, event: Json) -> None:
    """An event of the messages protocol: a content block starts or grows."""
    block, delta = event.get("content_block"), event.get("delta")
    if isinstance(block, dict) and block.get("type") == "tool_use":
        draft.call(event.get("index"), block.get("name"), "")
    if isinstance(delta, dict):
        draft.reasoning += str(delta.get("thinking") or "")
        draft.content += str(delta.get("text") or "")
        if delta.get("partial_json"):
            draft.call(event.get("index"), "", delta["partial_json"])


def _events(body: bytes) -> Iterator[Json]:
    for line in body.splitlines():
        if line.startswith(b"data:"):
            event = _parse(line[5:])
            if isinstance(event, dict):
                yield event


def _common(shown: Sequence[Message], request: Sequence[Message]) -> int:
    """How many leading messages agree, but for white space around them, which harnesses like to strip."""
    length = 0
    for one, other in zip(shown, request, strict=False):
        if one.role != other.role or one.text.strip() != other.text.strip():
            break
        length += 1
    return length


def _dicts(value: Any) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _decode(body: bytes) -> str:
    return body.decode("utf-8", errors="replace")
