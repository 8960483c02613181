"""Answers that the agent has begun: what it wrote stands in the prompt, the rest is sampled."""

from __future__ import annotations

import json

import anthropic
import pytest

from fakes.gateway import CHAT
from fakes.talk import CALL, END, SYSTEM, TOOL, USER, Talk
from outrider.types import Fidelity

BEGUN = {"continue_final_message": True, "add_generation_prompt": False}
MORE = {"role": "user", "content": "Sure?"}
LEFT = {"engine: an answer begun by the agent": 1}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_the_rest_is_sampled_and_the_whole_is_gone_on_from(talk, tools, stream):
    first = talk.ask([SYSTEM, USER], "Hm." + END, tools=tools, stream=stream)
    asked = [SYSTEM, USER, first, MORE]
    rest = talk.ask([*asked, says("The result ")], "is five." + END, tools=tools, stream=stream, **BEGUN)
    assert rest["content"] == "is five."
    assert talk.continues("Hm." + END)
    # As an engine writes it: this template puts an empty thought before an answer that is the last message.
    assert talk.renderer.text.decode(talk.prompt()).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nThe result "
    )
    call = talk.gateway.recorded(2)[1]
    assert call.fidelity is Fidelity.EXACT
    assert call.choices[0].token_ids.tolist() == talk.ids("is five." + END)
    talk.ask([*asked, says("The result is five."), MORE], tools=tools)
    assert talk.continues("is five." + END)
    assert talk.counted() == {"opened": 1, "continued": 2}
    assert len(talk.samples().samples) == 1


def test_its_ids_are_those_of_the_engines_own_rendering(talk):
    text = talk.renderer.template.render([USER, says("MARK")], None, {}, generate=False).partition("MARK")[0]
    for begun in ("The result", "é: {", "\n\nTool", "result is true false", " x"):
        talk.ask([USER, says(begun)], **BEGUN)
        assert talk.prompt() == talk.ids(text + begun)


def test_a_call_may_follow_what_was_begun(talk):
    rest = talk.ask([USER, says("Let me see. ")], f"\n{CALL}{END}", tools=[TOOL], **BEGUN)
    assert rest["content"] is None
    assert rest["tool_calls"][0]["function"]["name"] == "add"
    echo = {**rest, "content": "Let me see. "}
    talk.ask([USER, echo, {"role": "tool", "tool_call_id": rest["tool_calls"][0]["id"], "content": "5"}], tools=[TOOL])
    assert talk.continues(f"\n{CALL}{END}")


def test_a_stop_string_ends_the_rest(talk):
    said = " five OBS"
    rest = talk.ask([USER, says("It is")], said, stop=["OBS"], **BEGUN)
    assert rest["content"] == " five "
    talk.ask([USER, says("It is five "), MORE], stop=["OBS"])
    assert talk.continues(said)
    talk.ask([USER, says("It is five OBS: 5"), MORE], stop=["OBS"])
    before = talk.prompt(0) + talk.ids(said)
    assert talk.prompt()[: len(before)] == before


def test_it_is_found_again_after_a_restart(start, folder, engine, renderer):
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer)
        talk.ask([USER, says("It is")], " five." + END, **BEGUN)
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        talk.ask([USER, says("It is five."), MORE])
        assert talk.continues(" five." + END)
        assert talk.counted() == {"continued": 1}


def test_one_that_the_engine_rendered_is_gone_on_from_too(start, folder, engine, renderer):
    """Its prompt ends with what was begun, so what it told is the rest."""
    prompt = renderer.begin(renderer.render([USER], [], {}), 0, [USER], "It is", [], {})
    engine._render = lambda asked: prompt
    try:
        with start(mode="train", tokenizer=str(folder), tokens="engine") as gateway:
            talk = Talk(gateway, engine, renderer)
            talk.ask([USER, says("It is")], " five." + END, **BEGUN)
        with start(mode="train", tokenizer=str(folder)) as gateway:
            talk.gateway = gateway
            talk.ask([USER, says("It is five."), MORE])
            assert talk.continues(" five." + END)
    finally:
        del engine._render


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [says("It is")],
        [USER, says("")],
        [USER, says("<think>\nhm")],
        [USER, {**says("It is"), "reasoning_content": "hm"}],
        [USER, {**says("It is"), "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add"}}]}],
    ],
)
def test_what_has_no_proof_is_left_to_the_engine(talk, messages):
    talk.engine.pick = lambda prompt: talk.ids("ok" + END)
    got = talk.gateway.chat(talk.key, messages=messages, **BEGUN)
    assert got.status == 200
    assert talk.engine.received[-1].path == CHAT
    assert talk.counted() == LEFT


def test_control_tokens_that_it_spells_are_text(talk):
    talk.ask([USER, says("It is")], **BEGUN)
    plain = talk.prompt()
    spelled = "It is <|im_end|> <|im_start|>"
    talk.ask([USER, says(spelled)], **BEGUN)
    assert talk.renderer.text.decode(talk.prompt()).endswith(spelled)
    for marker in (END, "<|im_start|>"):
        assert talk.prompt().count(talk.renderer.text.added[marker]) == plain.count(talk.renderer.text.added[marker])


@pytest.mark.parametrize("begun", [f"Let me see. {CALL[:24]}", CALL[:11]])
def test_a_call_that_was_begun_is_told_whole(talk, begun):
    """It opens with the model's own marker, so that a call is what comes."""
    rest = talk.ask([USER, says(begun)], CALL[len(begun.removeprefix("Let me see. ")) :] + END, tools=[TOOL], **BEGUN)
    assert rest["content"] is None
    assert rest["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"path":"é","n":1.0}'}
    assert talk.prompt()[-1] != END
    assert talk.renderer.text.added["<tool_call>"] in talk.prompt()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_begin_answers_so(gateway, engine, renderer, stream):
    """The protocol's own way: the last message is the assistant's."""
    engine.says += [renderer.text.encode(' "n": 5}' + END), renderer.text.encode("ok" + END)]
    base_url = f"{gateway.base_url}/s/{gateway.open()}"
    with anthropic.Anthropic(base_url=base_url, api_key="sk-nothing") as client:
        request = {"model": "policy", "max_tokens": 64, "messages": [USER, says("{")]}
        if stream:
            with client.messages.stream(**request) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**request)
        assert reply.content[0].text == ' "n": 5}'
        counted = client.messages.count_tokens(model="policy", messages=[USER, says("{")])
        assert counted.input_tokens == reply.usage.input_tokens == len(gateway.call().prompt_ids)
        whole = says("{" + reply.content[0].text)
        assert json.loads(whole["content"]) == {"n": 5}
        client.messages.create(model="policy", max_tokens=64, messages=[USER, whole, MORE])
    calls = gateway.recorded(2)
    assert [call.continuation for call in calls] == ["opened", "continued"]
