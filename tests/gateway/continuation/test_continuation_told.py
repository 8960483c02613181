"""Answers of an engine's own chat replies."""

from __future__ import annotations

import json

import pytest

from outrider.gateway.continuation.told import told_answers


def call(name, arguments, **fields):
    return {"function": {"name": name, "arguments": arguments}, **fields}


def stream(*deltas):
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def plain(*calls, content="", **fields):
    made = [{"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls]
    return {0: {"role": "assistant", "content": content, **fields, **({"tool_calls": made} if made else {})}}


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (stream({"role": "assistant", "content": ""}, {"content": "né "}, {"content": "x"}), plain(content="né x")),
        (stream({"reasoning": "h"}, {"reasoning": "m"}, {"content": "x"}), plain(content="x", reasoning_content="hm")),
        (
            stream(
                {"tool_calls": [call("add", "", index=0, id="a")]},
                {"tool_calls": [call(None, '{"n"', index=0)]},
                {"tool_calls": [call(None, ": 1}", index=0), call("sub", "{}", index=1, id="b")]},
            ),
            plain(("a", "add", '{"n": 1}'), ("b", "sub", "{}")),
        ),
        (
            stream({"tool_calls": [call("f", "{}", index=0, id="a"), call("g", "{}", index=0, id="b")]}),
            plain(("a", "f", "{}"), ("b", "g", "{}")),
        ),
        (b": ping\n\nevent: x\n" + stream({"content": "x"}), plain(content="x")),
        (
            json.dumps({"choices": [{"message": {"content": None, "tool_calls": [call("f", "{}", id="a")]}}]}).encode(),
            plain(("a", "f", "{}")),
        ),
        (b'{"choices": [{"index": 0, "message": {"content": "x", "reasoning_content": null}}]}', plain(content="x")),
        (b'{"choices": ', {}),
        (b'data: {"choices": 3}\n\n', {}),
        (b'{"error": {}}', {}),
        (b"", {}),
    ],
)  # fmt: skip
def test_what_was_told(response, told):
    assert told_answers(response) == told
