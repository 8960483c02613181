"""The input items of a Responses request as chat messages."""

from __future__ import annotations

from typing import Any

from outrider.dialects.openai_responses_history import REFERENCE
from outrider.dialects.openai_responses_tools import ToolTable, custom_arguments
from outrider.dialects.translate import (
    bad,
    content_of,
    file_part,
    image_part,
    text_part,
    tool_call,
    tool_messages,
    want_list,
    want_name,
    want_object,
    want_text,
)
from outrider.dialects.translate_reasoning import unseal
from outrider.errors import RequestError
from outrider.types import Json

# Chat templates know no developer.
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class Messages:
    """Takes input items in order. What one answer of the model was cut into becomes one assistant message again."""

    def __init__(self, tools: ToolTable) -> None:
        self.notes: list[str] = []
        self._tools = tools
        self._messages: list[Json] = []
        self._open: Json | None = None
        """The assistant message that items still join."""
        self._thought = False
        """The last item was reasoning, so what follows is of the same answer."""
        self._media: list[Json] = []
        """Images among tool results: they go behind the last of them."""

    def result(self) -> list[Json]:
        self._flush()
        return self._messages

    def add(self, item: Any, where: str) -> None:
        kind = want_object(item, where).get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where, custom=kind == "custom_tool_call")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._output(item, where)
        elif kind == "additional_tools":
            pass  # gathered before
        elif kind == REFERENCE:
            id = want_name(item.get("id"), f"{where}.id")
            raise RequestError(f"Item with id '{id}' not found.", status=404, param="input")
        elif isinstance(kind, str):
            self.notes.append(f"item: {kind}")
        else:
            raise bad(f"{where}.type", "must be a string.")

    # -- items -----------------------------------------------------------------------------------------------------

    def _message(self, item: Json, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad(f"{where}.role", f"must be user, assistant, system or developer, not {role!r}.")
        parts = self._parts(item.get("content"), f"{where}.content")
        if ROLES[role] != "assistant":
            self._flush()
            self._messages.append({"role": ROLES[role], "content": content_of(parts)})
            return
        # Two messages in a row are two, unless a call or a thought shows that they are of one answer.
        if self._open is not None and self._open["content"] and not self._thought and "tool_calls" not in self._open:
            self._flush()
        message = self._assistant()
        self._thought = False
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        if len(text) < sum(len(part.get("text", "")) or 1 for part in parts):
            self.notes.append("part: an assistant message that is more than text")
        message["content"] += text

    def _reasoning(self, item: Json, where: str) -> None:
        text = _reasoning_text(item, where)
        if text is None:
            self.notes.append("reasoning: another server's encrypted_content")
            return
        message = self._assistant()
        self._thought = True
        if text:
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _call(self, item: Json, where: str, *, custom: bool) -> None:
        call_id = want_name(item.get("call_id"), f"{where}.call_id")
        name = self._tools.name_of(item.get("name"), item.get("namespace"), where=where)
        if custom:
            arguments = custom_arguments(want_text(item.get("input"), f"{where}.input"))
        else:
            arguments = want_text(item.get("arguments"), f"{where}.arguments")
        message = self._assistant()
        self._thought = False
        message.setdefault("tool_calls", []).append(tool_call(call_id, name, arguments))

    def _output(self, item: Json, where: str) -> None:
        call_id = want_name(item.get("call_id"), f"{where}.call_id")
        parts = self._parts(item.get("output"), f"{where}.output")
        self._open = None
        message, media = tool_messages(call_id, parts)
        self._messages.append(message)
        self._media += media

    # -- messages --------------------------------------------------------------------------------------------------

    def _assistant(self) -> Json:
        if self._open is None:
            self._flush()
            self._open = {"role": "assistant", "content": ""}
            self._messages.append(self._open)
        return self._open

    def _flush(self) -> None:
        self._open = None
        self._thought = False
        if self._media:
            self._messages.append({"role": "user", "content": content_of(self._media)})
            self._media = []

    # -- parts -----------------------------------------------------------------------------------------------------

    def _parts(self, content: Any, where: str) -> list[Json]:
        if isinstance(content, str):
            return [text_part(content)] if content else []
        parts = []
        for index, part in enumerate(want_list(content, where)):
            at = f"{where}.{index}"
            kind = want_object(part, at).get("type")
            if kind in ("input_text", "output_text", "text", "summary_text"):
                parts.append(text_part(want_text(part.get("text"), f"{at}.text")))
            elif kind == "refusal":
                parts.append(text_part(want_text(part.get("refusal"), f"{at}.refusal")))
            elif kind == "input_image" and isinstance(part.get("image_url"), str):
                parts.append(image_part(part["image_url"], part.get("detail")))
            elif kind == "input_file" and isinstance(part.get("file_data"), str):
                parts.append(file_part(part["file_data"], part.get("filename")))
            elif isinstance(kind, str):
                self.notes.append(f"part: {kind}")
                parts.append(text_part(f"[{kind} left out]"))
            else:
                raise bad(f"{at}.type", "is required.")
        return parts


def _reasoning_text(item: Json, where: str) -> str | None:
    """The reasoning in an item that we issued; None for one that only its issuer can read."""
    sealed = item.get("encrypted_content")
    if sealed:
        return unseal(sealed)
    for name in ("content", "summary"):
        parts = want_list(item.get(name) or [], f"{where}.{name}")
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts:
            return "".join(texts)
    return ""
