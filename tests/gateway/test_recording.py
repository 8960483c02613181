"""What is asked of the engine, what the agent gets, and what the store holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fakes.engine import Sampled
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES
from outrider.types import CallState, Fidelity, Mode

SAMPLED = Sampled()


def test_a_plain_chat_call_is_stored_exact_and_answered_without_the_tokens(engine, gateway):
    key = gateway.open(sampling={"temperature": 1.0})
    got = gateway.chat(key, temperature=0, seed=7)

    asked = engine.received[0].json
    assert asked["return_token_ids"] is True
    assert asked["logprobs"] is True
    assert got.status == 200
    assert "prompt_token_ids" not in got.json
    choice = got.json["choices"][0]
    assert "token_ids" not in choice
    assert choice["logprobs"] is None
    assert choice["message"]["content"] == SAMPLED.text
    assert choice["message"]["x_future"] == {"a": 1}

    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.prompt_ids.tolist() == [1, 2, 3]
    assert call.prompt_ids.dtype == np.int32
    assert call.choices[0].token_ids.tolist() == list(SAMPLED.ids)
    assert call.choices[0].logprobs.tolist() == list(SAMPLED.logprobs)
    assert call.choices[0].finish_reason == "stop"
    assert call.usage.completion_tokens == 5
    assert call.model == "policy"
    assert call.dialect == "openai_chat"
    assert json.loads(call.request)["temperature"] == 0
    assert "prompt_token_ids" in json.loads(call.response)
    assert call.duration_s > 0
    assert not call.streamed


def test_a_streamed_chat_call_is_stored_exact_and_forwarded_without_the_tokens(engine, gateway):
    got = gateway.chat(gateway.open(), stream=True)

    assert engine.received[0].json["stream_options"] == {"include_usage": True}
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got.events[-1] == "[DONE]"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in got.events[:-1])
    assert text == SAMPLED.text
    assert b"token_ids" not in got.body
    assert all(event["choices"][0]["logprobs"] is None for event in got.events[:-1])

    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == list(SAMPLED.ids)
    assert call.prompt_ids.tolist() == [1, 2, 3]
    assert call.streamed
    assert call.first_token_s is not None
    assert call.response.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_are_stored_exact_too(engine, gateway, streamed):
    key = gateway.open()
    got = gateway.post(f"/s/{key}{COMPLETIONS}", {"model": "policy", "prompt": [5, 6], "stream": streamed})

    assert engine.received[0].json["logprobs"] == 1
    assert got.status == 200
    assert b"token_ids" not in got.body
    call = gateway.call()
    assert call.dialect == "openai_completions"
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].logprobs.tolist() == list(SAMPLED.logprobs)


def test_what_the_agent_asked_for_is_not_hidden(engine, gateway):
    options = {"include_usage": True}
    got = gateway.chat(gateway.open(), stream=True, logprobs=True, return_token_ids=True, stream_options=options)
    assert got.body == gateway.call().response
    assert got.events[-2]["choices"] == []
    assert got.events[-2]["usage"]["completion_tokens"] == 5


def test_a_plain_answer_with_nothing_to_hide_passes_byte_for_byte(engine, gateway):
    got = gateway.chat(gateway.open(), logprobs=True, return_token_ids=True)
    assert got.body == gateway.call().response


@pytest.mark.parametrize("where", ["bearer", "x-api-key"])
def test_the_key_works_as_api_key_and_is_not_sent_on(engine, gateway, where):
    key = gateway.open()
    headers = {"authorization": f"Bearer {key}"} if where == "bearer" else {"x-api-key": key}
    got = gateway.post(CHAT, {"model": "policy", "messages": MESSAGES}, {**headers, "x-mine": "kept"})
    assert got.status == 200
    assert key not in str(engine.received[0].headers)
    assert engine.received[0].headers["x-mine"] == "kept"
    assert gateway.call().fidelity is Fidelity.EXACT


def test_unknown_request_fields_and_the_query_reach_the_engine(engine, gateway):
    key = gateway.open()
    gateway.post(f"/s/{key}{CHAT}?api-version=1", {"messages": MESSAGES, "extra": 1, "metadata": {"x": 1.50}})
    assert engine.received[0].json["extra"] == 1
    assert b'"metadata":{"x": 1.5}' in engine.received[0].body
    assert engine.received[0].query == "api-version=1"


def test_record_mode_keeps_requests_and_answers_as_they_are(engine, gateway):
    key = gateway.open(mode=Mode.RECORD, sampling={"temperature": 1.0})
    body = b'{"model": "policy",  "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.0}'
    got = gateway.post(f"/s/{key}{CHAT}", body)
    assert engine.received[0].body == body
    call = gateway.call()
    assert got.body == call.response
    assert call.fidelity is Fidelity.TEXT
    assert call.version_start is None


def test_eval_mode_records_tokens(engine, gateway):
    gateway.chat(gateway.open(mode=Mode.EVAL))
    assert gateway.call().fidelity is Fidelity.EXACT


# -- sampling overrides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})], ids=["chat", "completions"]
)
@pytest.mark.parametrize("agent", [{"temperature": 0, "seed": 7, "top_p": 0.9}, {}], ids=["sent", "omitted"])
def test_R05_overrides_replace_named_parameters_on_every_api_also_where_omitted(engine, gateway, path, prompt, agent):
    key = gateway.open(sampling={"temperature": 0.7})
    gateway.post(f"/s/{key}{path}", {**prompt, **agent})
    asked = engine.received[0].json
    assert asked["temperature"] == 0.7
    assert asked.get("seed") == agent.get("seed")
    assert gateway.call().sampling == {**agent, "temperature": 0.7}


def test_R05_overriding_one_name_of_a_parameter_removes_the_other(engine, gateway):
    gateway.chat(gateway.open(sampling={"max_tokens": 8}), max_completion_tokens=4096)
    asked = engine.received[0].json
    assert asked["max_tokens"] == 8
    assert "max_completion_tokens" not in asked
    assert gateway.call().sampling == {"max_tokens": 8}
