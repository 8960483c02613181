"""Twenty turns of a tool through the openai SDK: one training row with exact continuation, many without."""

from __future__ import annotations

import json

import openai
import pytest

from fakes.talk import END, SYSTEM, TOOL, USER
from outrider.trajectory import build
from outrider.types import Fidelity

TURNS = 20


def thought(turn):
    return f"<think>\nstep {turn}\n</think>\n\n"


def body(turn):
    """A call's JSON as a model may write it, with spaces and numbers that no template writes."""
    return f'{{"name": "add", "arguments": {{"n":  {turn}.0, "path":"é",  "last": false}}}}'


def scripted(ids, *, thinks):
    """What the model says turn by turn: a call each, and a text at the end."""
    said = [f"{thought(turn) * thinks}<tool_call>\n{body(turn)}\n</tool_call>{END}" for turn in range(TURNS - 1)]
    return [ids(text) for text in [*said, "Done." + END]]


def verbatim(message):
    return message.model_dump(exclude_none=True)


def re_serialised(message):
    """As LangGraph, Pydantic-AI and others send it back."""
    echo = message.model_dump(exclude_none=True)
    for call in echo.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    echo.setdefault("content", "")
    return echo


def without_reasoning(message):
    echo = re_serialised(message)
    echo.pop("reasoning_content", None)
    return echo


def run(client, echo, *, stream=False):
    """An agent: calls its tool until the model says something else."""
    messages = [SYSTEM, USER]
    while True:
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as events:
                message = events.get_final_completion().choices[0].message
        else:
            reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = reply.choices[0].message
        messages.append(echo(message))
        if not message.tool_calls:
            return message
        for call in message.tool_calls:
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "false\n"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tokens", "echo", "thinks", "samples"),
    [
        ("gateway", verbatim, False, 1),
        ("gateway", re_serialised, False, 1),
        ("gateway", re_serialised, True, 1),
        ("gateway", without_reasoning, True, TURNS),
        ("engine", verbatim, False, TURNS),
        ("engine", re_serialised, False, TURNS),
    ],
)
def test_twenty_turns(start, folder, engine, renderer, stream, tokens, echo, thinks, samples):
    engine.says += scripted(renderer.text.encode, thinks=thinks)
    with start(mode="train", tokenizer=str(folder), tokens=tokens) as gateway:
        key = gateway.open()
        with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="sk-nothing") as client:
            assert run(client, echo, stream=stream).content == "Done."
        calls = gateway.recorded(TURNS)
    assert {call.fidelity for call in calls} == {Fidelity.EXACT}
    found = build(calls).samples(rollout_id="r", group_id="g")
    assert len(found.samples) == samples
    sampled = sum(len(call.choices[0].token_ids) for call in calls)
    assert sum(int(sample.loss_mask.sum()) for sample in found.samples) == sampled
