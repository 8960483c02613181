"""Agents that send calls back as text: what they write is known to the byte, so it is the same call or it is not."""

from __future__ import annotations

import json

import pytest

from fakes.talk import CALL, END, SYSTEM, TOOL, USER, Talk
from outrider.gateway.continuation.retold import retellings

SEEN = {"role": "user", "content": "Observation:\n5"}


def as_smolagents(message, *, streamed=False):
    """As its memory writes a step, and its model joins two messages of one role."""
    calls = [
        {"id": call["id"], "type": "function"}
        | {"function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in sorted(message["tool_calls"], key=lambda call: call["id"])
    ]
    parts = [f"Calling tools:\n{calls}"]
    if message["content"] is not None or streamed:
        parts.insert(0, (message["content"] or "").strip())
    return {"role": "assistant", "content": [{"type": "text", "text": "\n".join(parts)}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [CALL, f"Let me see.\n\n{CALL}", f"Both.\n{CALL}\n{CALL}"])
def test_a_conversation_is_one_row(talk, said, stream):
    messages = [SYSTEM, USER]
    for _ in range(4):
        message = talk.ask(messages, said + END, tools=[TOOL], stream=stream)
        messages += [as_smolagents(message, streamed=stream), SEEN]
    talk.ask(messages, tools=[TOOL])
    assert talk.continues(said + END)
    assert talk.counted() == {"opened": 1, "continued": 4}
    assert len(talk.samples().samples) == 1
    assert "Calling tools" not in talk.renderer.text.decode(talk.prompt())


def test_it_goes_on_after_a_restart(start, folder, engine, renderer):
    messages = [USER]
    for turn in range(3):
        with start(mode="train", tokenizer=str(folder)) as gateway:
            if not turn:
                talk = Talk(gateway, engine, renderer)
            talk.gateway = gateway
            message = talk.ask(messages, CALL + END, tools=[TOOL])
            assert not turn or talk.continues(CALL + END)
            messages += [as_smolagents(message), SEEN]


def test_many_calls_are_told_in_their_order(talk):
    message = talk.ask([USER], CALL * 300 + END, tools=[TOOL])
    ids = [call["id"] for call in message["tool_calls"]]
    assert ids == sorted(ids)
    assert len(set(ids)) == 300


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("'é'", "'e'"),
        lambda text: text.replace("1.0", "1"),
        lambda text: text.replace("'call_", "'call_0"),
        lambda text: text.replace("'add'", "'sub'"),
        lambda text: text + " ",
        lambda text: text.replace("Calling tools:", "Called tools:"),
        lambda text: "So: " + text,
    ],
)
def test_another_text_is_another_call(talk, change):
    message = talk.ask([USER], CALL + END, tools=[TOOL])
    text = as_smolagents(message)["content"][0]["text"]
    assert change(text) != text
    talk.ask([USER, {"role": "assistant", "content": change(text)}, SEEN], tools=[TOOL])
    assert talk.counted() == {"opened": 1, "broke: tool call rewritten by the harness": 1}


def test_reasoning_that_is_not_told_is_a_break(talk):
    message = talk.ask([USER], f"<think>\nhm\n</think>\n\n{CALL}{END}", tools=[TOOL])
    talk.ask([USER, as_smolagents(message), SEEN], tools=[TOOL])
    assert talk.counted() == {"opened": 1, "broke: reasoning dropped by the harness": 1}


def test_what_is_forgotten_is_forgotten_in_each_form(gateway, engine, renderer):
    branches = gateway._app._relay._continuation._branches
    branches._max_tokens = 1
    talk = Talk(gateway, engine, renderer)
    for number in range(3):
        talk.ask([{**USER, "content": str(number)}], CALL + END, tools=[TOOL])
        (attempt,) = branches._attempts.values()
        assert len(attempt.branches) == 1
        assert set(attempt.retold.values()) == set(attempt.branches.values())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": [1, 2.50, null, true, "\\u00e9"]}', "{'a': [1, 2.5, None, True, 'é']}"),
        ('{"a": "[1, {\\"b\\": 2}]", "c": "{no", "d": "[x]"}', "{'a': [1, {'b': 2}], 'c': '{no', 'd': '[x]'}"),
        ("{bad", "'{bad'"),
        ("", "''"),
        ("[1]", "[1]"),
    ],
)
def test_arguments_are_told_as_smolagents_keeps_them(arguments, told):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    texts = retellings({"role": "assistant", "content": "", "tool_calls": [call]})
    whole = f"[{{'id': 'c1', 'type': 'function', 'function': {{'name': 'add', 'arguments': {told}}}}}]"
    assert texts == (f"\nCalling tools:\n{whole}", f"Calling tools:\n{whole}")


def test_arguments_that_nest_too_deeply_are_not_retold():
    nested = "[" * 100_000
    for arguments in (nested, f'{{"a": "{nested}"}}', json.dumps({"a": nested + "]" * 100_000})):
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        assert isinstance(retellings({"role": "assistant", "content": "", "tool_calls": [call]}), tuple)
