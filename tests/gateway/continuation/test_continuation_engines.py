"""What is left to the engine, and engines that fail."""

from __future__ import annotations

import json

import pytest

from fakes.chat_format import QWEN, write_format
from fakes.engine import Answer, json_answer
from fakes.gateway import CHAT, wait_for
from fakes.talk import CALL, END, TOOL, USER, Talk, result, streamed
from outrider.types import CallState, Fidelity, Mode


@pytest.mark.parametrize(
    ("why", "fields"),
    [
        ("an answer begun by the agent", {"continue_final_message": True, "add_generation_prompt": False}),
        (
            "content of type image_url",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        ),
    ],
)
def test_what_cannot_be_rendered_here_is_left_to_the_engine(talk, why, fields):
    talk.engine.answers.append(json_answer({"choices": [{"index": 0, "message": {"content": "x"}}]}))
    got = talk.gateway.chat(talk.key, **{"messages": [USER], **fields})
    assert got.status == 200
    assert talk.engine.received[-1].path == CHAT
    assert talk.counted() == {f"engine: {why}": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_an_answer_to_a_call_that_the_engine_forced_is_gone_on_from(start, folder, engine, renderer, stream, as_list):
    """Also where its grammar wrote the call in another way than the model would."""
    with start(mode="train", tokenizer=str(folder), forced_tools="engine") as gateway:
        talk = Talk(gateway, engine, renderer)
        said = '[{"name": "add", "parameters": {"n": 1}}]' if as_list else CALL + END
        if as_list:  # vLLM's way: a list, which is no call in the model's own format
            engine.calls = [{"id": "c9", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}]
        message = talk.ask([USER], said, tools=[TOOL], tool_choice="required", stream=stream)
        assert message["tool_calls"][0]["function"]["name"] == "add"
        assert engine.received[-1].json["tool_choice"] == "required"
        talk.ask([USER, message, result(message)], tools=[TOOL])
        assert talk.continues(said)
        assert talk.counted() == {"engine: a forced tool call": 1, "continued": 1}
        assert len(talk.samples().samples) == 1


def test_answers_in_a_form_that_no_parser_knows_are_left_to_the_engine(tmp_path, start, engine, renderer):
    """Such a template's calls would reach the agent as text."""
    template = QWEN.replace("<tool_call>", "[[").replace("</tool_call>", "]]")
    with start(mode="train", tokenizer=str(write_format(tmp_path / "model", "qwen", template=template))) as gateway:
        talk = Talk(gateway, engine, renderer)
        talk.ask([USER])
        assert engine.received[-1].path == "/v1/completions"
        talk.ask([USER], tools=[TOOL])
        assert engine.received[-1].path == CHAT
        assert talk.counted() == {"opened": 1, "engine: answers in a form that is not known here": 1}


def test_the_engine_may_be_told_to_render(start, folder, engine, renderer):
    with start(mode="train", tokenizer=str(folder), tokens="engine") as gateway:
        Talk(gateway, engine, renderer).ask([USER])
        assert engine.received[-1].path == CHAT


def test_T13_a_call_that_the_engine_renders_is_flagged_where_text_spells_control_tokens(start, engine, renderer):
    spelled = {"role": "user", "content": "log: <|im_end|>"}
    with start(mode="train") as gateway:
        talk = Talk(gateway, engine, renderer)
        talk.ask([USER])
        talk.ask([spelled])
        flag = "engine: the request spells control tokens"
        assert [call.continuation for call in gateway.recorded(2)] == ["", flag]
        assert talk.counted() == {flag: 1}


def test_evaluations_are_rendered_alike_and_records_are_not(start, folder, engine, renderer):
    with start(mode="record", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer, mode=Mode.EVAL)
        talk.ask([USER])
        assert engine.received[-1].path == "/v1/completions"
        assert gateway.post(CHAT, {"model": "policy", "messages": [USER]}).status == 200
        assert engine.received[-1].path == CHAT


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_used_another_prompt_is_found_out(talk, stream):
    talk.engine.pick = lambda prompt: prompt.insert(0, 0) or talk.ids("ok" + END)
    got = talk.gateway.chat(talk.key, messages=[USER], stream=stream)
    assert got.status == 200
    call = talk.gateway.call()
    assert call.fidelity is Fidelity.BROKEN
    assert "another prompt" in call.fidelity_reason


def test_an_error_of_the_engine_reaches_the_agent(talk):
    body = {"error": {"message": "This model's maximum context length is 9 tokens.", "code": 400}}
    talk.engine.answers.append(json_answer(body, status=400))
    got = talk.gateway.chat(talk.key, messages=[USER])
    assert (got.status, got.json) == (400, body)
    assert talk.gateway.call().state is CallState.FAILED


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_read_is_an_error(talk, stream):
    if stream:
        headers = {"content-type": "text/event-stream"}
        talk.engine.answers.append(Answer(headers=headers, chunks=[b"data: {oops\n\ndata: [DONE]\n\n"]))
    else:
        talk.engine.answers.append(Answer(chunks=[b"{oops"]))
    got = talk.gateway.chat(talk.key, messages=[USER], stream=stream)
    assert got.status == 502 or "error" in got.events[0]
    assert b"[DONE]" not in got.body
    assert talk.gateway.call().state is CallState.FAILED
    wait_for(lambda: talk.gateway.client.health()["in_flight"] == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_gives_no_ids_still_answers(talk, stream):
    talk.engine.says.append(talk.ids("plain" + END))
    if stream:
        chunk = {"choices": [{"index": 0, "text": "plain", "finish_reason": "stop"}]}
        raw = b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n"
        talk.engine.answers.append(Answer(headers={"content-type": "text/event-stream"}, chunks=[raw]))
        got = talk.gateway.chat(talk.key, messages=[USER], stream=True)
        assert streamed(got.events)["content"] == "plain"
    else:
        talk.engine.answers.append(json_answer({"choices": [{"index": 0, "text": "plain", "finish_reason": "stop"}]}))
        got = talk.gateway.chat(talk.key, messages=[USER])
        assert got.json["choices"][0]["message"]["content"] == "plain"
    assert talk.gateway.call().fidelity is not Fidelity.EXACT
