"""The tools of a Responses request as chat functions, and the way back from a function's name.

Responses know more kinds of tools than chat: `custom` ones take free text instead of JSON, and a `namespace` groups
others. The model sees all of them as functions; a custom tool is one with a single string, ``input``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from outrider.dialects.translate import bad, dumps, function_tool, want_list, want_name, want_object
from outrider.types import Json

# Codex's name for the namespace of tools that belong to none. Calls are answered to it without a namespace.
DEFAULT_NAMESPACE = "functions"
SEPARATOR = "__"
MAX_NAME = 64  # OpenAI's limit for the name of a function

_CUSTOM_PARAMETERS: Json = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ToolTable:
    """Tools by the name that the model sees."""

    def __init__(self) -> None:
        self.functions: list[Json] = []
        """For the chat request's ``tools``."""
        self.notes: list[str] = []
        self._by_name: dict[str, Tool] = {}
        self._names: dict[tuple[str | None, str], str] = {}

    def add(self, tools: Any, where: str, namespace: str | None = None) -> None:
        """Add a list of tools as a request holds it. Raises `RequestError`."""
        for index, tool in enumerate(want_list(tools, where)):
            at = f"{where}.{index}"
            kind = want_object(tool, at).get("type")
            if kind == "namespace":
                name = want_name(tool.get("name"), f"{at}.name")
                self.add(tool.get("tools") or [], f"{at}.tools", None if name == DEFAULT_NAMESPACE else name)
            elif kind == "function":
                self._add_function(tool, at, namespace)
            elif kind == "custom":
                self._add_custom(tool, at, namespace)
            elif isinstance(kind, str):
                self.notes.append(f"hosted tool: {kind}")
            else:
                raise bad(f"{at}.type", "is required.")

    def find(self, name: str) -> Tool:
        """What the model means by `name`; a function where it made the name up."""
        return self._by_name.get(name) or Tool(name)

    def name_of(self, name: Any, namespace: Any, *, where: str) -> str:
        """The name that the model sees for a tool of the client's, also for one that is no longer offered."""
        own = want_name(name, f"{where}.name")
        group = namespace if isinstance(namespace, str) and namespace != DEFAULT_NAMESPACE else None
        return self._names.get((group, own)) or _joined(own, group)

    def _add_function(self, tool: Json, where: str, namespace: str | None) -> None:
        own = want_name(tool.get("name"), f"{where}.name")
        parameters = tool.get("parameters")
        schema = {"type": "object", "properties": {}} if parameters is None else parameters
        schema = want_object(schema, f"{where}.parameters")
        name = self._enter(Tool(own, namespace))
        if name is not None:
            strict = tool.get("strict") is True
            self.functions.append(function_tool(name, tool.get("description"), schema, strict=strict))

    def _add_custom(self, tool: Json, where: str, namespace: str | None) -> None:
        own = want_name(tool.get("name"), f"{where}.name")
        name = self._enter(Tool(own, namespace, custom=True))
        if name is None:
            return
        description = tool.get("description")
        texts = [description] if isinstance(description, str) and description else []
        form = tool.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            texts.append(f"The input must match this {form.get('syntax')} grammar:\n{form.get('definition')}")
        self.functions.append(function_tool(name, "\n\n".join(texts), _CUSTOM_PARAMETERS))

    def _enter(self, tool: Tool) -> str | None:
        """The name for the model; None for a tool that is there already."""
        key = (tool.namespace, tool.name)
        if key in self._names:
            self.notes.append(f"tool given twice: {tool.name}")
            return None
        name = base = _joined(tool.name, tool.namespace)
        count = 1
        while name in self._by_name:
            count += 1
            name = f"{base[: MAX_NAME - 3]}_{count}"
        self._by_name[name] = tool
        self._names[key] = name
        return name


def custom_arguments(text: str) -> str:
    """A custom tool's input as the arguments of the function that the model sees."""
    return dumps({"input": text})


def custom_input(arguments: str) -> str:
    """The other way round. A model that wrote free text where JSON was asked for meant it as the input."""
    try:
        found = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(found, str):
        return found
    if isinstance(found, dict) and len(found) == 1:
        value = next(iter(found.values()))
        if isinstance(value, str):
            return value
    return arguments


def _joined(name: str, namespace: str | None) -> str:
    if namespace is None:
        return name
    joined = f"{namespace}{SEPARATOR}{name}"
    return joined if len(joined) <= MAX_NAME else name
