"""The wire: shapes that clients rely on, and errors that name the field."""

from __future__ import annotations

import httpx
import openai
import pytest

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def refused(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages[0].tool_calls"),
        ({"messages": HELLO, "temperature": -1}, "temperature"),
        ({"messages": HELLO, "temperature": "hot"}, "temperature"),
        ({"messages": HELLO, "temperature": 1e-9}, "temperature"),
        ({"messages": HELLO, "top_p": 0}, "top_p"),
        ({"messages": HELLO, "top_p": 1.5}, "top_p"),
        ({"messages": HELLO, "top_k": -2}, "top_k"),
        ({"messages": HELLO, "n": 0}, "n"),
        ({"messages": HELLO, "n": True}, "n"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"messages": HELLO, "seed": "x"}, "seed"),
        ({"messages": HELLO, "stop": [1]}, "stop"),
        ({"messages": HELLO, "stop": ["x"] * 17}, "stop"),
        ({"messages": HELLO, "stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": HELLO, "tools": {}}, "tools"),
        ({"messages": HELLO, "tool_choice": "always"}, "tool_choice"),
        ({"messages": HELLO, "logit_bias": {"1": 2}}, "logit_bias"),
        ({"messages": HELLO, "presence_penalty": 0.5}, "presence_penalty"),
        ({"messages": HELLO, "response_format": {"type": "grammar"}}, "response_format"),
    ],
)
def test_a_bad_chat_field_is_named(engine, body, param):
    error = refused(engine.post(CHAT, **body))
    assert error["param"] == param
    assert param.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, 10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
    ],
)
def test_a_bad_completion_field_is_named(engine, body, param):
    assert refused(engine.post("/v1/completions", **body))["param"] == param


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"3"])
def test_a_body_that_is_no_json_object(engine, body):
    refused(engine.http.post(CHAT, content=body))


def test_neutral_values_of_unsupported_fields_are_fine(engine):
    body = {"messages": HELLO, "max_tokens": 1, "logit_bias": {}, "presence_penalty": 0, "tool_choice": "none"}
    body |= {"response_format": {"type": "text"}, "x_unknown": 1, "frequency_penalty": 0.0, "user": "u"}
    assert engine.post(CHAT, **body).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_what_cannot_be_forced_is_left_to_the_model_and_said(engine, choice):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = {"messages": HELLO, "max_tokens": 1, "tools": tools, "response_format": {"type": "json_object"}}
    answer = engine.post(CHAT, **body, tool_choice=choice)
    assert answer.status_code == 200
    assert answer.headers["x-outrider-ignored"] == "tool_choice, response_format"
    assert "x-outrider-ignored" not in engine.post(CHAT, messages=HELLO, max_tokens=1, tool_choice="auto").headers
    answer = engine.post("/v1/completions", prompt=[1], max_tokens=1, response_format={"type": "json_object"})
    assert answer.headers["x-outrider-ignored"] == "response_format"


def test_another_model_does_not_exist(engine):
    error = refused(engine.post(CHAT, model="gpt-x", messages=HELLO), 404)
    assert error["code"] == "model_not_found"


def test_unknown_routes_and_methods_answer_in_shape(engine):
    refused(engine.http.get("/v1/nothing"), 404)
    refused(engine.http.get(CHAT), 405)


def test_models_and_health(engine):
    listed = engine.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("policy", 256)]
    assert engine.http.get("/health").status_code == 200


def test_R11_over_the_window_is_the_familiar_error(engine):
    error = refused(engine.post("/v1/completions", prompt=[1] * 200, max_tokens=100))
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 256 tokens. However, you requested 300 tokens" in error["message"]
    assert "(200 in the prompt, 100 in the completion)" in error["message"]
    error = refused(engine.post(CHAT, messages=[{"role": "user", "content": "x y " * 200}]))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


@pytest.mark.parametrize("asked", [256, 131072, None])
def test_R11_the_whole_window_as_max_tokens_is_cut_to_what_is_left(engine, asked):
    limit = {} if asked is None else {"max_tokens": asked}
    body = engine.complete([1] * 240, ignore_eos=True, **limit)
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (16, "length")


def test_the_window_is_usable_to_its_last_token(engine):
    assert engine.complete([1] * 255, max_tokens=1, ignore_eos=True)["usage"]["total_tokens"] == 256
    refused(engine.post("/v1/completions", prompt=[1] * 256, max_tokens=1))


@pytest.mark.parametrize("ask", [{"prompt": [[1, 2], [3]]}, {"messages": HELLO}])
def test_a_plain_answer_says_the_policy_version_of_each_choice(engine, ask):
    ask = ask | {"max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    body = engine.post(CHAT if "messages" in ask else "/v1/completions", **ask).json()
    assert [choice["policy_versions"] for choice in body["choices"]] == [[[0, 3]]] * len(body["choices"])


def test_token_fields_are_absent_unless_asked_for(engine):
    plain = engine.post(CHAT, messages=HELLO, max_tokens=2).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert "policy_versions" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    events = engine.stream(CHAT, messages=HELLO, max_tokens=2)
    assert not any("usage" in event or "prompt_token_ids" in event for event in events)


def test_a_chat_stream_opens_with_the_role_and_the_prompt(engine):
    ask = {"messages": HELLO, "max_tokens": 3, "return_token_ids": True, "ignore_eos": True, "n": 2}
    events = engine.stream(CHAT, **ask)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert events[0]["prompt_token_ids"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    told = [
        (choice["index"], choice["policy_versions"])
        for event in events
        for choice in event["choices"]
        if "policy_versions" in choice
    ]
    assert told == [(0, [[0, 1]]), (1, [[0, 1]])]  # each once, since no other version follows


def test_answers_carry_the_policy_version(engine):
    plain = engine.post(CHAT, messages=HELLO, max_tokens=2)
    assert plain.headers["x-outrider-policy-version"] == plain.headers["x-outrider-policy-version-end"] == "0"
    with engine.http.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 2, "stream": True}) as response:
        assert response.headers["x-outrider-policy-version"] == "0"
        response.read()


def test_a_token_that_is_half_a_character_is_spelled_in_bytes(engine, tiny):
    from transformers import AutoTokenizer

    half = AutoTokenizer.from_pretrained(tiny).convert_tokens_to_ids("\u00f0")  # byte 0xF0 in GPT-2's spelling
    assert half is not None
    found = engine.post(
        CHAT, messages=HELLO, max_tokens=60, temperature=3.0, logprobs=True, top_logprobs=20, ignore_eos=True, seed=1
    ).json()["choices"][0]["logprobs"]["content"]
    entries = [top for entry in found for top in [entry, *entry["top_logprobs"]]]
    halves = [entry for entry in entries if entry["token"].startswith("bytes:")]
    assert halves
    assert all(
        bytes(entry["bytes"]).decode("utf-8", "replace").endswith("\N{REPLACEMENT CHARACTER}") for entry in halves
    )
    assert all(entry["token"] == "bytes:" + "".join(f"\\x{b:02x}" for b in entry["bytes"]) for entry in halves)


def test_the_openai_client_reads_it(engine):
    client = openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", http_client=httpx.Client())
    with client:
        answer = client.chat.completions.create(
            model="policy", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content) == 4
        chunks = list(
            client.chat.completions.create(
                model="policy", messages=HELLO, max_tokens=4, stream=True, stream_options={"include_usage": True}
            )
        )
        assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens
        text = client.completions.create(model="policy", prompt="the", max_tokens=3, logprobs=2)
        assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="policy", prompt=[1] * 300, max_tokens=3)
