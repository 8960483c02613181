"""Answers that come back in another form: to the byte what an agent makes of them, or other answers."""

from __future__ import annotations

import json

import pytest

from fakes.talk import CALL, END, SYSTEM, TOOL, USER, Talk
from outrider.gateway.continuation.retold import is_read, retellings

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


@pytest.mark.parametrize("cut", [str.strip, str.rstrip])
@pytest.mark.parametrize("end", [END, ""])
def test_an_answer_may_come_back_without_the_space_at_its_ends(talk, cut, end):
    said = "\n So, add 5 to \n"
    talk.engine.finish_reason = "stop" if end else "length"
    assert talk.ask([USER], said + end)["content"] == said
    messages = [USER, {"role": "assistant", "content": cut(said)}, SEEN]
    talk.ask(messages, said + end)
    assert talk.continues(said + end)
    talk.ask([*messages, {"role": "assistant", "content": cut(said)}, SEEN])
    assert talk.continues(said + end)
    assert talk.counted() == {"opened": 1, "continued": 2}


@pytest.mark.parametrize(
    ("said", "echo"),
    [("It is five.", "It is five. "), ("It is five. ", "It is five"), (" It is", "  It is"), ("It  is", "It is")],
)
def test_A10_other_space_is_another_answer(talk, said, echo):
    talk.ask([USER], said + END)
    talk.ask([USER, {"role": "assistant", "content": echo}, SEEN])
    assert talk.counted() == {"opened": 1, "broke: history rewritten": 1}


def test_a_thought_is_missed_before_an_answer_that_was_cut(talk):
    talk.ask([USER], f"<think>\nhm\n</think>\n\nFive. {END}")
    talk.ask([USER, {"role": "assistant", "content": "Five."}, SEEN])
    assert talk.counted() == {"opened": 1, "broke: reasoning dropped by the harness": 1}


def test_what_is_forgotten_is_forgotten_in_each_form(gateway, engine, renderer):
    branches = gateway._app._relay._continuation._branches
    branches._max_tokens = 1
    talk = Talk(gateway, engine, renderer)
    for number in range(3):
        talk.ask([{**USER, "content": str(number)}], CALL + END, tools=[TOOL])
        (attempt,) = branches._attempts.values()
        assert len(attempt.branches) == 1
        assert not attempt.written_on
        assert set(attempt.retold.values()) == set(attempt.branches.values())


READ = 'Perhaps {"name": "add", "arguments": {"a": "[1]", "b": "é"}} would do. '
NEW_ID = "0c9f4a52-7d0c-4a3e-9a53-2b9df3e7c5a1"


def read(said=READ, call_id=NEW_ID, name="add", arguments="{'a': [1], 'b': 'é'}"):
    """As smolagents goes on where the model made no call: it takes one from the text."""
    told = f"[{{'id': '{call_id}', 'type': 'function', 'function': {{'name': '{name}', 'arguments': {arguments}}}}}]"
    return {"role": "assistant", "content": f"{said.strip()}\nCalling tools:\n{told}"}


def test_words_that_are_forgotten_are_not_looked_at(gateway, engine, renderer):
    branches = gateway._app._relay._continuation._branches
    branches._max_tokens = 1
    talk = Talk(gateway, engine, renderer)
    for number in range(3):
        talk.ask([{**USER, "content": str(number)}], READ + END)
        (attempt,) = branches._attempts.values()
        assert [one for listed in attempt.written_on.values() for one in listed] == list(attempt.branches.values())


@pytest.mark.parametrize("again", [False, True])
def test_a_call_that_was_read_from_words_says_what_they_say(start, folder, engine, renderer, again):
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer)
        assert "tool_calls" not in talk.ask([USER], READ + END, tools=[TOOL])
        if not again:
            second = talk.ask([USER, read(), SEEN], READ + END, tools=[TOOL])
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        if again:
            second = talk.ask([USER, read(), SEEN], READ + END, tools=[TOOL])
        assert talk.continues(READ + END)
        assert second["content"] == READ
        talk.ask([USER, read(), SEEN, read(), SEEN], tools=[TOOL])
        assert talk.continues(READ + END)
        assert len(talk.samples().samples) == 1
        assert "Calling tools" not in renderer.text.decode(talk.prompt())


@pytest.mark.parametrize(
    "echo",
    [
        read(call_id="call_1"),
        read(name="sub"),
        read(arguments="{'a': [1], 'b': 'e'}"),
        read(arguments="{'a': '[1]', 'b': 'é'}"),
        read(said=READ.replace("would", "should")),
        {"role": "assistant", "content": read()["content"] + " "},
        {**read(), "reasoning_content": "hm"},
    ],
)
def test_another_call_is_not_what_the_words_say(talk, echo):
    talk.ask([USER], READ + END, tools=[TOOL])
    talk.ask([USER, echo, SEEN], tools=[TOOL])
    assert talk.counted() == {"opened": 1, "broke: history rewritten": 1}


@pytest.mark.parametrize(
    ("said", "name", "arguments", "same"),
    [
        ('{"name": "add"}', "add", "None", True),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "add", "{'a': 1}", True),
        ('{"name": "add", "arguments": "a\nb"}', "add", r"'a\nb'", True),
        ('{"tool": "add"}', "add", "None", False),
        ('{"name": "add"} and {"name": "sub"}', "add", "None", False),
        ("{" + '"a": {' * 100_000 + "}", "add", "None", False),
        ("} {", "add", "None", False),
    ],
)
def test_words_are_read_as_smolagents_reads_them(said, name, arguments, same):
    echo = read(said=said, name=name, arguments=arguments)
    assert is_read({"role": "assistant", "content": said}, echo["content"]) is same


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
    texts = [told["content"] for told in retellings({"role": "assistant", "content": "", "tool_calls": [call]})]
    whole = f"[{{'id': 'c1', 'type': 'function', 'function': {{'name': 'add', 'arguments': {told}}}}}]"
    assert texts == [f"\nCalling tools:\n{whole}", f"Calling tools:\n{whole}"]


def test_arguments_that_nest_too_deeply_are_not_retold():
    nested = "[" * 100_000
    for arguments in (nested, f'{{"a": "{nested}"}}', json.dumps({"a": nested + "]" * 100_000})):
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        assert len(list(retellings({"role": "assistant", "content": "", "tool_calls": [call]}))) in (0, 2)
