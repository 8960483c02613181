"""Exact continuation under the other protocols, through their SDKs."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from fakes.talk import CALL, END, USER
from outrider.trajectory import build
from outrider.types import Fidelity

TURNS = 4
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


def scripted(ids):
    return [*(ids(f"<think>\nhm {turn}\n</think>\n\n{CALL}{END}") for turn in range(TURNS - 1)), ids("Done." + END)]


def moved(messages):
    """`cache_control` on the last block only, as harnesses move it."""
    made = json.loads(json.dumps(messages))
    for message in made:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    made[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return made


def claude(client, *, stream):
    """An agent in the manner of Claude Code: a billing line that changes, moved `cache_control`, late reminders."""
    messages = [{"role": "user", "content": "go"}]
    for turn in range(TURNS):
        header = f"x-anthropic-billing-header: cc_version=9.9; cch={turn:04x};"
        request = {
            "model": "policy",
            "max_tokens": 64,
            "system": [{"type": "text", "text": header}, {"type": "text", "text": "You are S."}],
            "messages": moved(messages),
            "tools": [TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        counted = client.messages.count_tokens(**{k: v for k, v in request.items() if k != "max_tokens"})
        if stream:
            with client.messages.stream(**request) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(**request)
        assert counted.input_tokens == reply.usage.input_tokens
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
            for block in reply.content
            if block.type == "tool_use"
        ]
        if not results:
            return reply
        messages.append({"role": "user", "content": results})
        messages.append({"role": "system", "content": f"<total_tokens>{900 - turn} left</total_tokens>"})
    raise AssertionError("the model never ended")


def rows(gateway):
    calls = gateway.recorded(TURNS)
    assert {call.fidelity for call in calls} == {Fidelity.EXACT}
    assert [call.continuation for call in calls] == ["opened"] + ["continued"] * (TURNS - 1)
    return build(calls).samples(rollout_id="r", group_id="g").samples


@pytest.mark.parametrize("stream", [False, True])
def test_A05_A06_A07_messages_are_one_row(gateway, engine, renderer, stream):
    """Thinking blocks go to the agent and come back, a count is the count of the prompt that follows."""
    engine.says += scripted(renderer.text.encode)
    base_url = f"{gateway.base_url}/s/{gateway.open()}"
    with anthropic.Anthropic(base_url=base_url, api_key="sk-nothing") as client:
        reply = claude(client, stream=stream)
    assert [block.text for block in reply.content] == ["Done."]
    (sample,) = rows(gateway)
    text = renderer.text.decode(sample.token_ids.tolist())
    assert "billing" not in text
    assert all(f"hm {turn}" in text for turn in range(TURNS - 1))
    assert text.index("900 left") < text.index("hm 1") < text.index("899 left")
    assert b"cch=0002" in gateway.store.calls("attempt-1")[2].request


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_one_row(gateway, engine, renderer, stream):
    engine.says += scripted(renderer.text.encode)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    base_url = f"{gateway.base_url}/s/{gateway.open()}/v1"
    items = [USER]
    with openai.OpenAI(base_url=base_url, api_key="sk-nothing") as client:
        for _ in range(TURNS):
            request = {"model": "policy", "input": items, "tools": [tool], "store": False, "instructions": "Be brief."}
            request["include"] = ["reasoning.encrypted_content"]
            if stream:
                with client.responses.stream(**request) as events:
                    reply = events.get_final_response()
            else:
                reply = client.responses.create(**request)
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                for item in reply.output
                if item.type == "function_call"
            ]
    assert reply.output_text == "Done."
    assert len(rows(gateway)) == 1


def test_responses_that_name_the_last_one_go_on_after_a_restart(start, folder, engine, renderer):
    """Each gateway knows but one call; the history and the sampled ids are both read from the store."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    engine.says += scripted(renderer.text.encode)
    key, request = "", {"model": "policy", "input": [USER], "tools": [tool]}
    for turn in range(TURNS):
        with start(mode="train", tokenizer=str(folder)) as gateway:
            key = key or gateway.open()
            got = gateway.post(f"/s/{key}/v1/responses", request)
            assert got.status == 200, got.body
            calls = [item for item in got.json["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "5"} for item in calls]
            request = {**request, "input": results, "previous_response_id": got.json["id"]}
            if turn == TURNS - 1:
                assert len(rows(gateway)) == 1
