"""Fields that no protocol knows, through a whole gateway: the SDK's `extra_body` to the engine, its answer back."""

from __future__ import annotations

import anthropic
import openai
import pytest

from fakes.engine import chunk, plain, stream, usage

OWN = {"kv_transfer_params": {"block": 7}}
EXTRA = {"min_p": 0.25, "structured_outputs": {"regex": "a+"}, "priority": -1, "x_future": [None, {"a": 1}]}
STREAMED = pytest.mark.parametrize("streamed", [False, True])


def prime(engine, streamed):
    said = {"role": "assistant", "content": "Hi"}
    if streamed:
        first = chunk(said, token_ids=[5], prompt_token_ids=[1], finish_reason="stop")
        engine.answers.append(stream(first | OWN, usage(1, 1)))
    else:
        engine.answers.append(plain({"message": said, "finish_reason": "stop"}, **OWN))


@STREAMED
def test_extensions_over_messages(engine, gateway, streamed):
    prime(engine, streamed)
    with anthropic.Anthropic(base_url=f"{gateway.base_url}/s/{gateway.open()}", api_key="k", max_retries=0) as client:
        ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
        if streamed:
            with client.messages.stream(**ask, metadata={"user_id": "u"}, extra_body=EXTRA) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**ask, metadata={"user_id": "u"}, extra_body=EXTRA)
    assert {name: engine.received[0].json.get(name) for name in EXTRA} == EXTRA
    assert "metadata" not in engine.received[0].json
    assert message.model_extra == OWN
    assert gateway.client.stats()["left_out"] == {"field: metadata": 1}


@STREAMED
def test_extensions_over_responses(engine, gateway, streamed):
    prime(engine, streamed)
    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{gateway.open()}/v1", api_key="k", max_retries=0) as client:
        ask = {"model": "m", "input": "go", "prompt_cache_key": "p"}
        if streamed:
            with client.responses.stream(**ask, extra_body=EXTRA) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**ask, extra_body=EXTRA)
    assert {name: engine.received[0].json.get(name) for name in EXTRA} == EXTRA
    assert "prompt_cache_key" not in engine.received[0].json
    assert response.kv_transfer_params == OWN["kv_transfer_params"]
    assert gateway.client.stats()["left_out"] == {"field: prompt_cache_key": 1}


def test_names_without_end_do_not_fill_the_counter(engine, gateway):
    key = gateway.open()
    tools = [{"type": f"web_{number}", "name": "x"} for number in range(150)]
    ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "tools": tools}
    assert gateway.post(f"/s/{key}/v1/messages", ask).status == 200
    found = gateway.client.stats()["left_out"]
    assert len(found) == 101
    assert found["others"] == 50
