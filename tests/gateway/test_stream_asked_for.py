"""An upstream that answers in the other way than it was asked: whole for a stream, a stream for a whole answer."""

from __future__ import annotations

import anthropic
import openai
import pytest

from fakes.engine import chunk, plain, stream, usage
from outrider.types import CallState, Fidelity

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WHOLE = {
    "message": {"role": "assistant", "content": "Hi", "reasoning": "hm", "tool_calls": [CALL]},
    "token_ids": [5, 2],
}
WHOLE |= {"finish_reason": "tool_calls", "logprobs": {"content": [{"token": "", "logprob": -0.5}] * 2}}
ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
def claude(gateway):
    base = f"{gateway.base_url}/s/{gateway.open('attempt-1')}"
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(gateway):
    with openai.OpenAI(
        base_url=f"{gateway.base_url}/s/{gateway.open('attempt-2')}/v1", api_key="k", max_retries=0
    ) as client:
        yield client


def test_messages_get_their_stream(engine, gateway, claude):
    engine.answers.append(plain(WHOLE))
    with claude.messages.stream(**ASK) as events:
        message = events.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[1].text, message.content[2].input) == ("Hi", {"a": 1})
    assert (message.stop_reason, message.usage.input_tokens) == ("tool_use", 2)
    assert (gateway.call().state, gateway.call().fidelity) == (CallState.COMPLETE, Fidelity.EXACT)


def test_responses_get_theirs_and_it_can_be_gone_on_from(engine, gateway, gpt):
    engine.answers.append(plain(WHOLE))
    with gpt.responses.stream(model="m", input="x", tools=[TOOL]) as events:
        response = events.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Hi"
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    gpt.responses.create(model="m", input=[result], previous_response_id=response.id)
    assert [message["role"] for message in engine.received[1].json["messages"]] == ["user", "assistant", "tool"]


@pytest.mark.parametrize("broken", [{"finish_reason": None}, {"message": None, "finish_reason": None}])
def test_what_is_no_answer_is_no_stream_either(engine, gateway, claude, broken):
    engine.answers.append(plain(WHOLE | broken))
    with pytest.raises(anthropic.APIStatusError) as found, claude.messages.stream(**ASK):
        pass
    assert found.value.status_code == 502
    assert gateway.call().state is CallState.FAILED


def test_a_stream_that_nobody_asked_for_is_an_error(engine, gateway, claude, gpt):
    for ask in (lambda: claude.messages.create(**ASK), lambda: gpt.responses.create(model="m", input="x")):
        engine.answers.append(stream(chunk({"content": "Hi"}, finish_reason="stop"), usage(1, 1)))
        with pytest.raises((anthropic.APIStatusError, openai.APIStatusError), match="not asked for"):
            ask()
