"""Calls that an agent sends back as text.

A harness may keep no tool calls in its history, and write them out there instead. That is a call of ours where the text
is, to the byte, what such a harness makes of the answer that it was told: so the text is made here too, and compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.types import Json


def retellings(message: Json) -> Sequence[str]:
    """All texts that `message`, a plain one with tool calls, may come back as."""
    try:
        calls = [_smolagents_call(call) for call in message["tool_calls"]]
    except RecursionError:
        return ()
    text = f"Calling tools:\n{calls}"
    said = message["content"].strip()
    # Where there was no text: with an empty one before it, as smolagents keeps of a stream, or with none.
    return (f"{said}\n{text}",) if said else (f"\n{text}", text)


def _smolagents_call(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = function["arguments"]
    told = {"name": function["name"], "arguments": _unpacked(arguments)}
    return {"id": call["id"], "type": "function", "function": told}


def _unpacked(value: Any) -> Any:
    """Texts that are JSON become what they stand for."""
    if isinstance(value, str) and (value[:1], value[-1:]) in (("{", "}"), ("[", "]")):
        try:
            return _unpacked(json.loads(value))
        except ValueError:
            return value
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    if isinstance(value, dict):
        return {key: _unpacked(one) for key, one in value.items()}
    return value
