"""Answers that an agent sends back in another form.

Some harnesses cut the blank space off an answer's ends. Some keep no tool calls in their history, and write them out as
text. That is an answer of ours where it is, to the byte, what such a harness makes of the answer that it was told: so
these forms are made here too, and compared. smolagents does both. Where the model made no call it looks for one in its
words, as JSON, and writes that out behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from outrider.types import Json

_TELLS = "Calling tools:\n"
_NEW_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def retellings(message: Json) -> Iterator[Json]:
    """All other messages that `message`, a plain answer, may come back as."""
    text = message["content"]
    for cut in {text.strip(), text.rstrip()} - {text}:
        yield {**message, "content": cut}
    if message.get("tool_calls") and not message.get("reasoning_content"):  # who tells calls so keeps no thoughts
        for told in _with_calls(text.strip(), message["tool_calls"]):
            yield {"role": "assistant", "content": told}


def _with_calls(said: str, calls: Sequence[Json]) -> Sequence[str]:
    try:
        text = _told([_call(one["id"], one["function"]) for one in calls])
    except RecursionError:
        return ()
    # Where there was no text: with an empty one before it, as smolagents keeps of a stream, or with none.
    return (f"{said}\n{text}",) if said else (f"\n{text}", text)


def may_be_read(message: Json) -> bool:
    """`message`, a plain one, makes no call, and one might be read from its words."""
    return not message.get("tool_calls") and "{" in message["content"]


def is_read(message: Json, text: str) -> bool:
    """`text` is that of `message`, of which `may_be_read` is true, and the call that is read from it."""
    said = message["content"].strip()
    if not text.startswith(f"{said}\n{_TELLS}"):
        return False
    found = _NEW_ID.search(text, len(said))
    try:
        blob = json.loads(said[said.find("{") : said.rfind("}") + 1], strict=False)
        if found is None or not isinstance(blob, dict) or "name" not in blob:
            return False
        return text == f"{said}\n{_told([_call(found[0], blob)])}"
    except (ValueError, RecursionError):
        return False


def _told(calls: Sequence[Json]) -> str:
    return f"{_TELLS}{calls}"


def _call(call_id: str, function: Json) -> Json:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    told = {"name": function["name"], "arguments": _unpacked(arguments)}
    return {"id": call_id, "type": "function", "function": told}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _unpacked(value: Any) -> Any:
    """Texts that are JSON become what they stand for."""
    if isinstance(value, str) and (value[:1], value[-1:]) in (("{", "}"), ("[", "]")):
        parsed = _parsed(value)
        return value if parsed is value else _unpacked(parsed)
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    if isinstance(value, dict):
        return {key: _unpacked(one) for key, one in value.items()}
    return value
