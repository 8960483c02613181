"""Tool calls that an agent forces: sampled as any other answer, and counted."""

from __future__ import annotations

import pytest

from fakes.engine import json_answer
from fakes.gateway import CHAT
from fakes.talk import CALL, END, TOOL, USER, Talk, result
from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.prometheus import Gauges, Metrics
from outrider.types import Fidelity, Mode

OTHER = {"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [TOOL, OTHER]
FREE, UNMADE = "a forced tool call, left free", "a forced tool call, left free and not made"


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def forced(talk):
    return talk.gateway.client._request("GET", "/admin/stats")["forced_tools"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.EVAL])
def test_a_forced_call_is_sampled_from_the_exact_prompt(gateway, engine, renderer, mode, stream):
    talk = Talk(gateway, engine, renderer, mode=mode)
    fields = {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    message = talk.ask([USER], CALL + END, **fields)
    talk.ask([USER, message, result(message)], CALL + END, **fields)
    assert talk.continues(CALL + END)
    assert [received.path for received in engine.received] == ["/v1/completions"] * 2
    assert not any("tool_choice" in received.json or "tools" in received.json for received in engine.received)
    calls = gateway.recorded(2)
    assert [call.continuation for call in calls] == [f"opened; {FREE}", f"continued; {FREE}"]
    assert {call.fidelity for call in calls} == {Fidelity.EXACT}
    assert talk.counted() == {"opened": 1, "continued": 1}
    assert forced(talk) == {"made": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_makes_no_call_answers_in_text_and_is_counted(talk, stream):
    fields = {"tools": [TOOL], "tool_choice": "required", "stream": stream}
    message = talk.ask([USER], "It is five." + END, **fields)
    assert message == {"role": "assistant", "content": "It is five."}
    assert talk.gateway.call().continuation == f"opened; {UNMADE}"
    assert talk.gateway.call().choices[0].finish_reason == "stop"
    talk.ask([USER, message, {"role": "user", "content": "Call a tool."}], CALL + END, **fields)
    assert talk.continues("It is five." + END)
    assert forced(talk) == {"made": 1, "not made": 1}
    assert len(talk.samples().samples) == 1


def test_of_an_answer_that_failed_nothing_is_said_or_counted(talk):
    talk.engine.answers.append(json_answer({"error": {"message": "too long"}}, status=400))
    got = talk.gateway.chat(talk.key, messages=[USER], tools=[TOOL], tool_choice="required")
    assert got.status == 400
    assert talk.gateway.call().continuation == f"opened; {FREE}"
    assert forced(talk) == {}


@pytest.mark.parametrize(
    ("choice", "note"),
    [
        ("required", FREE),
        (named("add"), FREE),
        (named("sub"), UNMADE),
        (allowed("required", "add"), FREE),
        (allowed("required", "sub"), UNMADE),
        (allowed("required", "sub", "add"), FREE),
        (allowed("auto", "sub"), ""),
        ("auto", ""),
        ("none", ""),
        (None, ""),
    ],
)
def test_each_way_to_force_a_call_renders_the_same_prompt(talk, choice, note):
    talk.ask([USER], tools=TOOLS)
    talk.ask([USER], CALL + END, tools=TOOLS, tool_choice=choice)
    assert talk.prompt(0) == talk.prompt(1)
    assert talk.gateway.recorded(2)[1].continuation == "opened" + (f"; {note}" if note else "")


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": named("mul"), "tools": TOOLS},
        {"tool_choice": {"type": "custom", "custom": {"name": "add"}}, "tools": TOOLS},
        {"tool_choice": allowed("required", "mul"), "tools": TOOLS},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": 5}}, "tools": TOOLS},
    ],
)
def test_a_choice_among_tools_that_are_not_there_is_for_the_engine_to_refuse(talk, fields):
    talk.ask([USER], **fields)
    assert talk.engine.received[-1].path == CHAT
    assert talk.counted() == {"engine: a forced tool call": 1}
    assert forced(talk) == {}


def test_functions_of_the_old_kind_are_not_lost(talk):
    talk.ask([USER], functions=[TOOL["function"]])
    assert talk.engine.received[-1].path == CHAT
    assert talk.engine.received[-1].json["functions"] == [TOOL["function"]]
    assert talk.counted() == {"engine: functions in place of tools": 1}


def test_each_of_several_answers_is_counted(talk):
    talk.engine.says += [talk.ids(CALL + END), talk.ids("No." + END)]
    got = talk.gateway.chat(talk.key, messages=[USER], tools=[TOOL], tool_choice="required", n=2)
    reasons = [choice["finish_reason"] for choice in got.json["choices"]]
    assert reasons == ["tool_calls", "stop"]
    assert talk.gateway.call().continuation == f"opened; {UNMADE}"
    assert forced(talk) == {"made": 1, "not made": 1}


def test_a_gateway_that_was_started_again_goes_on_from_a_forced_call(start, folder, engine, renderer):
    fields = {"tools": [TOOL], "tool_choice": "required"}
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk = Talk(gateway, engine, renderer)
        message = talk.ask([USER], CALL + END, **fields)
    with start(mode="train", tokenizer=str(folder)) as gateway:
        talk.gateway = gateway
        talk.ask([USER, message, result(message)], CALL + END, **fields)
        assert talk.continues(CALL + END)
        assert len(talk.samples().samples) == 1


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (
            "messages",
            {"max_tokens": 64, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
            | {"tool_choice": {"type": "any"}, "messages": [USER]},
        ),
        (
            "messages",
            {"max_tokens": 64, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
            | {"tool_choice": {"type": "tool", "name": "add"}, "messages": [USER]},
        ),
        (
            "responses",
            {"tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]}
            | {"tool_choice": "required", "input": "What is 2 + 3?"},
        ),
    ],
)
def test_other_protocols_force_calls_too(talk, route, fields):
    talk.engine.says.append(talk.ids(CALL + END))
    got = talk.gateway.post(f"/s/{talk.key}/v1/{route}", {"model": "policy", **fields})
    assert got.status == 200, got.body
    assert talk.gateway.call().continuation == f"opened; {FREE}"


def test_the_metrics_tell_how_many_were_made():
    counters = Counters()
    for made in (True, True, False):
        counters.forced_tools(made=made)
    gauges = Gauges(
        in_flight=0,
        upstream_in_flight=0,
        store_queue=0,
        paused=False,
        draining=False,
        policy_version=None,
        log_lines_lost=0,
    )
    text = Metrics().render(counters.snapshot(), gauges).decode()
    assert 'outrider_forced_tools_total{call="made"} 2\n' in text
    assert 'outrider_forced_tools_total{call="not made"} 1\n' in text
