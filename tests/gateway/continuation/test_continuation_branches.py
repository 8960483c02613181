"""Which branch a request goes on with, and what breaks one."""

from __future__ import annotations

import json

import pytest

from fakes.talk import CALL, END, SYSTEM, TOOL, USER, Talk, result
from outrider.types import Fidelity

OTHER_TOOL = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}


def rewritten(message):
    echo = json.loads(json.dumps(message))
    echo["tool_calls"][0]["function"]["arguments"] = '{"path": "other"}'
    return echo


def as_text(message):
    """Calls that a harness sends back as text, in a way that is not known."""
    return {"role": "assistant", "content": f"Calling tools:\n{[call['function'] for call in message['tool_calls']]}"}


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("system prompt changed", lambda m: {"messages": [{**SYSTEM, "content": "Be long."}, *m[1:]]}),
        ("system prompt changed", lambda m: {"messages": m[1:]}),
        ("tools changed", lambda m: {"messages": m, "tools": [TOOL, OTHER_TOOL]}),
        ("tools changed", lambda m: {"messages": m, "tools": []}),
        ("template options changed", lambda m: {"messages": m, "chat_template_kwargs": {"enable_thinking": False}}),
        ("history rewritten", lambda m: {"messages": [m[0], {**USER, "content": "What?"}, *m[2:]]}),
        ("history rewritten", lambda m: {"messages": [*m[:2], {**m[2], "content": "Hm."}, m[3]]}),
        ("tool call rewritten by the harness", lambda m: {"messages": [*m[:2], rewritten(m[2]), m[3]]}),
        ("tool call rewritten by the harness", lambda m: {"messages": [*m[:2], as_text(m[2]), USER]}),
        ("history rewritten", lambda m: {"messages": [*m[:2], {**m[2], "content": "By the way."}, m[3]]}),
    ],
)
def test_a_break_is_named_counted_and_opens_a_branch(talk, cause, change):
    message = talk.ask([SYSTEM, USER], CALL + END, tools=[TOOL])
    fields = {"tools": [TOOL]} | change([SYSTEM, USER, message, result(message)])
    again = talk.ask(say="Five." + END, **fields)
    assert not talk.continues(CALL + END)
    assert talk.counted() == {"opened": 1, f"broke: {cause}": 1}
    assert [call.fidelity for call in talk.gateway.recorded(2)] == [Fidelity.EXACT] * 2
    talk.ask([*fields.pop("messages"), again, {"role": "user", "content": "more"}], **fields)
    assert talk.continues("Five." + END)


def test_order_of_keys_and_unknown_tool_options_are_no_change(talk):
    message = talk.ask([USER], CALL + END, tools=[TOOL])
    shuffled = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}
    talk.ask([USER, message, result(message)], tools=[shuffled], tool_choice="none", parallel_tool_calls=False)
    assert talk.continues(CALL + END)


def test_A06_ten_turns_behind_a_billing_header_are_one_row(talk):
    messages = []
    for turn in range(10):
        header = f"x-anthropic-billing-header: cc_version=9.9; cch={turn:04x};\n"
        messages.append({"role": "user", "content": f"step {turn}"})
        system = {"role": "system", "content": header + "You are S."}
        messages.append(talk.ask([system, *messages], f"did {turn}" + END))
    assert talk.counted() == {"opened": 1, "continued": 9}
    assert len(talk.samples().samples) == 1
    assert b"cch=0003" in talk.gateway.recorded(10)[3].request
    assert "billing" not in talk.renderer.text.decode(talk.prompt())


def test_A05_reminders_of_the_system_stay_in_place(talk):
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"step {turn}"})
        messages.append({"role": "system", "content": f"<total_tokens>{900 - turn} tokens left</total_tokens>"})
        messages.append(talk.ask([SYSTEM, *messages], "did" + END))
    assert talk.counted() == {"opened": 1, "continued": 2}
    text = talk.renderer.text.decode(talk.prompt())
    assert text.index("step 0") < text.index("900 tokens") < text.index("step 1") < text.index("899 tokens")


def test_sub_agents_on_one_key_each_go_on_with_their_own(talk):
    first = {name: [{"role": "user", "content": f"task {name}"}] for name in "abc"}
    for name, messages in first.items():
        messages.append(talk.ask(messages, f"did {name}" + END))
    for name in "cab":
        talk.ask([*first[name], {"role": "user", "content": "more"}])
        text = talk.renderer.text.decode(talk.prompt())
        assert f"did {name}" in text
        assert text.count("task ") == 1
    assert talk.counted() == {"opened": 3, "continued": 3}
    assert len(talk.samples().samples) == 3


def test_two_calls_may_go_on_with_one_answer(talk):
    message = talk.ask([USER], "one" + END)
    for text in ("left", "right"):
        talk.ask([USER, message, {"role": "user", "content": text}])
        before = talk.prompt(0) + talk.ids("one" + END)
        assert talk.prompt()[: len(before)] == before
    assert talk.counted() == {"opened": 1, "continued": 2}


def test_the_longest_match_wins(talk):
    one = [USER, talk.ask([USER], "one" + END)]
    two = [*one, {"role": "user", "content": "x"}]
    two.append(talk.ask(two, "two" + END))
    talk.ask([*two, {"role": "user", "content": "y"}])
    assert talk.continues("two" + END)


def test_another_attempt_shares_nothing(gateway, engine, renderer):
    one = Talk(gateway, engine, renderer)
    message = one.ask([USER], CALL + END, tools=[TOOL])
    other = Talk(gateway, engine, renderer, attempt_id="attempt-2")
    other.ask([USER, message, result(message)], tools=[TOOL])
    assert one.counted() == {"opened": 2}


def test_a_gateway_that_was_started_again_goes_on(start, folder, engine, renderer):
    said = f"<think>\nhm\n</think>\n\nSee.\n{CALL}{END}"
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer)
        message = talk.ask([USER], said, tools=[TOOL])
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        second = talk.ask([USER, message, result(message)], "Five." + END, tools=[TOOL])
        assert talk.continues(said)
        assert talk.counted() == {"continued": 1}
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        streaming = [USER, message, result(message), second]
        talk.ask([*streaming, result(message, "again")], tools=[TOOL], stream=True)
        assert talk.continues("Five." + END)
        assert len(talk.samples().samples) == 1


def test_memory_is_bounded_and_what_was_forgotten_is_read_again(gateway, engine, renderer):
    talks = [Talk(gateway, engine, renderer, attempt_id=f"attempt-{n}") for n in range(4)]
    branches = gateway._app._relay._continuation._branches
    branches._max_tokens = 60  # about two of these
    messages = [talk.ask([USER], f"did {n}" + END) for n, talk in enumerate(talks)]
    assert branches._tokens <= 60
    assert len(branches._attempts) < 4
    for n, talk in enumerate(talks):
        talk.ask([USER, messages[n], {"role": "user", "content": "more"}])
        assert f"did {n}" in renderer.text.decode(talk.prompt())
    assert talks[0].counted() == {"opened": 4, "continued": 4}
    assert branches._tokens <= 60 or len(branches._attempts) == 1


def test_a_history_that_breaks_at_each_turn_reads_each_call_from_the_store_but_once(talk, monkeypatch):
    """Where a harness sends no reasoning back, every call continues nothing, and the store is asked each time."""
    read = []
    calls = type(talk.gateway.store).calls
    monkeypatch.setattr(
        type(talk.gateway.store), "calls", lambda *asked: read.append(len(found := calls(*asked))) or found
    )
    messages = [USER]
    for turn in range(6):
        message = talk.ask(messages, f"<think>\nhm\n</think>\n\n{CALL}{END}", tools=[TOOL])
        message.pop("reasoning_content")
        messages += [message, result(message, str(turn))]
    assert talk.counted() == {"opened": 1, "broke: reasoning dropped by the harness": 5}
    assert read == [1] * 5


STOPPED = "Thought.\n<code>\nx = 5\n</code>"


def written_on(text):
    return {"role": "assistant", "content": STOPPED + text}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("text", ["", "\nCalling tools: [<tool_call>]<|im_end|>"])
def test_an_agent_may_write_on_what_a_stop_string_ended(start, folder, engine, renderer, text, again):
    """As smolagents' code agent does, which puts back the stop string too."""
    stop = {"stop": ["Observation:", "</code>"]}
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer)
        assert talk.ask([USER], STOPPED, **stop)["content"] == STOPPED.removesuffix("</code>")
        messages = [USER, written_on(text), USER]
        if not again:
            second = talk.ask(messages, "so" + END, **stop)
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        if again:  # what it was is read from the store
            second = talk.ask(messages, "so" + END, **stop)
        assert talk.continues(STOPPED)
        added = talk.prompt()[len(talk.prompt(-2)) + len(talk.ids(STOPPED)) :]
        assert renderer.text.decode(added).startswith(f"{text}<|im_end|>\n<|im_start|>user\n")
        assert renderer.text.added["<tool_call>"] not in added
        talk.ask([*messages, second, USER], **stop)
        assert talk.continues("so" + END)
        assert len(talk.samples().samples) == 1


def test_T12_a_stop_string_that_the_agent_never_saw_stays_in_the_context(talk):
    """The echo means what was told; the prompt has what was sampled. So it is one row, and the policy saw all of it."""
    message = talk.ask([USER], STOPPED, stop=["</code>"])
    assert message["content"] == STOPPED.removesuffix("</code>")
    talk.ask([USER, message, USER], stop=["</code>"])
    assert talk.continues(STOPPED)
    assert len(talk.samples().samples) == 1


@pytest.mark.parametrize(
    ("text", "cause"), [(STOPPED + " and more", "reasoning dropped by the harness"), ("So.", "history rewritten")]
)
def test_a_thought_before_what_was_written_on_is_missed(talk, text, cause):
    talk.ask([USER], f"<think>\nhm\n</think>\n\n{STOPPED}", stop=["</code>"])
    talk.ask([USER, {"role": "assistant", "content": text}, USER], stop=["</code>"])
    assert talk.counted() == {"opened": 1, f"broke: {cause}": 1}


@pytest.mark.parametrize(
    ("said", "echo"),
    [
        (STOPPED, {"role": "assistant", "content": "Another.</code> and more"}),
        (STOPPED, {**written_on(" and more"), "reasoning_content": "hm"}),
        ("Done." + END, {"role": "assistant", "content": "Done. And more"}),
        (STOPPED + END, written_on(" and more")),
    ],
)
def test_what_was_ended_or_is_another_is_not_written_on(talk, said, echo):
    talk.ask([USER], said, stop=["</code>"])
    talk.ask([USER, echo, USER], stop=["</code>"])
    assert talk.counted() == {"opened": 1, "broke: history rewritten": 1}
