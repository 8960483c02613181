"""Messages and Responses through the gateway, over an upstream that speaks chat only: the real SDKs, and faults."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from openai.types.responses import Response

from fakes.engine import Answer, Sampled, chunk, json_answer, plain, raw_stream, stream, usage
from fakes.gateway import CHAT
from outrider.errors import StoreError
from outrider.types import CallState, Fidelity, Mode

MESSAGES, RESPONSES, COUNT = "/v1/messages", "/v1/responses", "/v1/messages/count_tokens"
ASK = {"model": "claude-x", "max_tokens": 64, "messages": [{"role": "user", "content": "go"}]}
ASK_RESPONSES = {"model": "gpt-x", "input": "go"}
BOTH_ASKS = pytest.mark.parametrize(("path", "ask"), [(MESSAGES, ASK), (RESPONSES, ASK_RESPONSES)])
STREAMED = pytest.mark.parametrize("streamed", [False, True])
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"file":  "a"}'}}
CALLING = Sampled(pieces=["", ""], ids=[8, 2], logprobs=[-1.0, -2.0], finish_reason="tool_calls", tool_calls=[CALL])
TOOL = {"name": "read", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
OVERFLOW = {
    "error": {
        "message": "This model's maximum context length is 8 tokens. However, you requested 9 tokens "
        "(7 in the messages, 2 in the completion). Please reduce the length of the messages or completion.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
}


@pytest.fixture
def claude(gateway):
    with anthropic.Anthropic(
        base_url=f"{gateway.base_url}/s/{gateway.open()}", api_key="sk-nothing", max_retries=0
    ) as client:
        yield client


@pytest.fixture
def gpt(gateway):
    with openai.OpenAI(
        base_url=f"{gateway.base_url}/s/{gateway.open()}/v1", api_key="sk-nothing", max_retries=0
    ) as client:
        yield client


def names(got):
    return [line[7:].decode() for line in got.body.split(b"\n") if line.startswith(b"event: ")]


# -- the anthropic SDK -------------------------------------------------------------------------------------------------


@STREAMED
def test_messages_with_text(engine, gateway, claude, streamed):
    if streamed:
        with claude.messages.stream(**ASK) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**ASK)
    assert message.content[0].text == Sampled().text
    assert (message.model, message.stop_reason) == ("claude-x", "end_turn")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (3, 5)
    call = gateway.call()
    assert (call.fidelity, call.fidelity_reason) == (Fidelity.EXACT, "")
    assert (call.dialect, call.model, call.streamed) == ("anthropic_messages", "claude-x", streamed)
    assert call.choices[0].token_ids.tolist() == [11, 12, 13, 14, 2]
    assert json.loads(call.request)["max_tokens"] == 64
    assert engine.received[0].path == CHAT


@STREAMED
def test_messages_with_thinking_and_tools(engine, gateway, claude, streamed):
    engine.answers.append(
        stream(
            chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1]),
            chunk({"reasoning": "hm"}, token_ids=[5]),
            chunk({"content": "Hi", "tool_calls": [{"index": 0, **CALL}]}, token_ids=[6], finish_reason="tool_calls"),
            usage(1, 2),
        )
        if streamed
        else plain(
            {
                "message": {"role": "assistant", "content": "Hi", "reasoning": "hm", "tool_calls": [CALL]},
                "finish_reason": "tool_calls",
            }
        )
    )
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = ASK | {"max_tokens": 2048, "tools": [TOOL], "thinking": thinking}
    if streamed:
        with claude.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"file": "a"}
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "x"}
    history = [
        *ASK["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    claude.messages.create(**asked | {"messages": history})
    sent = engine.received[1].json["messages"]
    assert sent[1]["reasoning_content"] == "hm"
    assert sent[1]["tool_calls"][0]["function"]["name"] == "read"
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "x"}


def test_A07_tokens_are_counted_and_nothing_is_recorded(engine, gateway, claude):
    counted = claude.messages.count_tokens(model="claude-x", messages=ASK["messages"], tools=[TOOL])
    assert counted.input_tokens == 3
    assert claude.messages.create(**ASK, tools=[TOOL]).usage.input_tokens == 3
    assert engine.received[0].json["messages"] == engine.received[1].json["messages"]
    assert len(gateway.recorded(1)) == 1
    assert gateway.post(COUNT, {}).status == 401
    key = gateway.open("attempt-2")
    assert gateway.post(f"/s/{key}{COUNT}?beta=true", ASK).json == {"input_tokens": 3}
    assert engine.received[2].query == ""
    got = gateway.post(f"/s/{key}{COUNT}", {"messages": 5})
    assert (got.status, got.json["error"]["type"]) == (400, "invalid_request_error")
    engine.answers.append(json_answer(OVERFLOW, status=400))
    assert gateway.post(f"/s/{key}{COUNT}", ASK).json == {"input_tokens": 7}
    assert gateway.store.calls("attempt-2") == []


@STREAMED
def test_A07_beta_queries_headers_system_blocks_and_images_are_no_hindrance(engine, gateway, claude, streamed):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    asked = {
        **ASK,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "go"}, image]}],
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
        "tools": [TOOL],
    }
    betas = ["interleaved-thinking-2025-05-14", "of-the-future-2031-01-01"]
    counted = claude.beta.messages.count_tokens(
        model="claude-x", betas=betas, **{name: asked[name] for name in ("messages", "system", "tools")}
    )
    answer = claude.beta.messages.create(**asked, betas=betas, stream=streamed)
    if streamed:
        started = next(event for event in answer if event.type == "message_start")
        assert started.message.usage.input_tokens == counted.input_tokens == 3
    else:
        assert answer.usage.input_tokens == counted.input_tokens == 3
    assert engine.received[0].json["messages"] == engine.received[1].json["messages"]
    assert "anthropic-beta" not in engine.received[1].headers
    assert [model.id for model in claude.models.list()] == ["policy"]


@STREAMED
def test_R11_a_long_prompt_is_told_in_anthropics_words(engine, gateway, claude, streamed):
    engine.answers.append(json_answer(OVERFLOW, status=400))
    with pytest.raises(anthropic.BadRequestError, match="input length and `max_tokens` exceed context limit: 7"):
        claude.messages.create(**ASK, stream=streamed)
    call = gateway.call()
    assert (call.state, call.status) == (CallState.FAILED, 400)


@STREAMED
def test_errors_of_the_upstream_are_the_sdks_own(engine, claude, streamed):
    engine.answers += [json_answer({"error": {"message": "slow down"}}, status=429), Answer(end="reset", status=500)]
    with pytest.raises(anthropic.RateLimitError, match="slow down"):
        claude.messages.create(**ASK, stream=streamed)
    with pytest.raises(anthropic.InternalServerError):
        claude.messages.create(**ASK, stream=streamed)


def test_S09_a_plain_answer_that_holds_an_error_is_a_502(engine, gateway, claude):
    engine.answers.append(json_answer({"error": {"message": "engine dead"}}))
    with pytest.raises(anthropic.InternalServerError, match="engine dead") as caught:
        claude.messages.create(**ASK)
    assert caught.value.status_code == 502
    call = gateway.call()
    assert (call.state, call.status) == (CallState.FAILED, 502)


# -- the openai SDK's responses ----------------------------------------------------------------------------------------


@STREAMED
def test_responses_with_text(engine, gateway, gpt, streamed):
    if streamed:
        with gpt.responses.stream(**ASK_RESPONSES) as events:
            response = events.get_final_response()
    else:
        response = gpt.responses.create(**ASK_RESPONSES)
        Response.model_validate(response.to_dict())
    assert response.output_text == Sampled().text
    assert (response.model, response.status, response.usage.input_tokens) == ("gpt-x", "completed", 3)
    call = gateway.call()
    assert (call.fidelity, call.dialect, call.model) == (Fidelity.EXACT, "openai_responses", "gpt-x")


@STREAMED
def test_responses_with_tools_go_on_from_an_earlier_one(engine, gateway, gpt, streamed):
    engine.sampled = [CALLING]
    asked = ASK_RESPONSES | {"tools": [RESPONSES_TOOL]}
    if streamed:
        with gpt.responses.stream(**asked) as events:
            first = events.get_final_response()
    else:
        first = gpt.responses.create(**asked)
    assert first.output[0].arguments == CALL["function"]["arguments"]
    engine.sampled = [Sampled()]
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "ok"}
    gpt.responses.create(model="gpt-x", input=[output], previous_response_id=first.id, tools=[RESPONSES_TOOL])
    assert [message["role"] for message in engine.received[1].json["messages"]] == ["user", "assistant", "tool"]
    assert all(call.fidelity is Fidelity.EXACT for call in gateway.recorded(2))
    other = {"model": "m", "input": "x", "previous_response_id": first.id}
    got = gateway.post(f"/s/{gateway.open('attempt-2')}{RESPONSES}", other)
    assert (got.status, got.json["error"]["code"]) == (404, "previous_response_not_found")
    assert got.json["error"]["param"] == "previous_response_id"


def test_R11_a_long_prompt_is_a_bad_request_or_a_failed_stream(engine, gateway, gpt):
    engine.answers += [json_answer(OVERFLOW, status=400)] * 2
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(**ASK_RESPONSES)
    assert caught.value.code == "context_length_exceeded"
    got = gateway.post(f"/s/{gateway.open('attempt-2')}{RESPONSES}", ASK_RESPONSES | {"stream": True})
    assert (got.status, got.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert names(got) == ["response.created", "response.in_progress", "error", "response.failed"]
    assert gateway.call("attempt-2").state is CallState.FAILED
    engine.answers.append(json_answer(OVERFLOW, status=400))
    with pytest.raises(openai.APIError, match="maximum context length"):
        list(gpt.responses.create(**ASK_RESPONSES, stream=True))


def test_C04_a_websocket_is_refused_with_426_and_a_plain_get_with_405(engine, gateway):
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    key = gateway.open()
    for path in (f"/s/{key}{RESPONSES}", RESPONSES):
        assert gateway.request("GET", path, headers=upgrade).status == 426
        assert gateway.request("GET", path).status == 405
    assert engine.received == []
    assert gateway.store.calls_after(0) == []


# -- what both have in common ------------------------------------------------------------------------------------------


@BOTH_ASKS
def test_a_stream_ends_only_after_the_commit_and_with_an_error_where_that_fails(gateway, monkeypatch, path, ask):
    key = gateway.open()

    def append_call(call):
        raise StoreError("disk is full")

    monkeypatch.setattr(gateway.store, "append_call", append_call)
    got = gateway.post(f"/s/{key}{path}", ask | {"stream": True})
    assert got.clean
    assert names(got)[-1] in ("error", "response.failed")
    assert not {"message_stop", "response.completed"} & set(names(got))
    assert gateway.client.stats()["not_recorded"] == {"store_failed": 1}


@BOTH_ASKS
@pytest.mark.parametrize("end", ["reset", "clean"])
def test_S09_a_stream_that_is_cut_ends_with_an_error(engine, gateway, path, ask, end):
    engine.answers.append(stream(chunk({"content": "x"}, prompt_token_ids=[1]), done=False, end=end))
    got = gateway.post(f"/s/{gateway.open()}{path}", ask | {"stream": True})
    assert got.clean
    assert names(got).count("error") + names(got).count("response.failed") == 1
    assert names(got)[-1] in ("error", "response.failed")
    assert gateway.call().state is CallState.FAILED


@BOTH_ASKS
def test_S02_a_finished_stream_without_done_is_complete(engine, gateway, path, ask):
    engine.answers.append(
        stream(chunk({"content": "x"}, prompt_token_ids=[1]), chunk({}, finish_reason="stop"), done=False)
    )
    got = gateway.post(f"/s/{gateway.open()}{path}", ask | {"stream": True})
    assert names(got)[-1] in ("message_stop", "response.completed")
    assert gateway.call().state is CallState.COMPLETE


@BOTH_ASKS
def test_a_chunk_that_is_not_json_ends_the_stream_with_one_error(engine, gateway, path, ask):
    engine.answers.append(raw_stream(b"data: {\n\n", b"data: [DONE]\n\n"))
    got = gateway.post(f"/s/{gateway.open()}{path}", ask | {"stream": True})
    assert names(got)[-1] in ("error", "response.failed")
    assert gateway.call().state is CallState.FAILED


@BOTH_ASKS
def test_a_bad_request_names_its_field_and_goes_nowhere(engine, gateway, path, ask):
    got = gateway.post(f"/s/{gateway.open()}{path}", ask | {"tools": [3]})
    assert got.status == 400
    assert "tools.0" in got.json["error"]["message"]
    assert got.json["error"].get("param", "tools.0") == "tools.0"
    assert engine.received == []


@BOTH_ASKS
@pytest.mark.parametrize("agent", [{"temperature": 0, "top_p": 0.5}, {}], ids=["sent", "omitted"])
def test_R05_overrides_replace_named_parameters_also_where_they_are_translated(engine, gateway, path, ask, agent):
    key = gateway.open(sampling={"temperature": 0.7, "max_tokens": 5, "seed": 3})
    limit = {"max_output_tokens": 64} if path == RESPONSES and agent else {}
    gateway.post(f"/s/{key}{path}", ask | agent | limit)
    asked = engine.received[0].json
    assert (asked["temperature"], asked["max_tokens"], asked["seed"]) == (0.7, 5, 3)
    assert asked.get("top_p") == agent.get("top_p")
    assert "max_completion_tokens" not in asked
    kept = gateway.call().sampling
    assert kept == kept | {"temperature": 0.7, "max_tokens": 5, "seed": 3}
    assert kept.get("top_p") == agent.get("top_p")


@BOTH_ASKS
@STREAMED
def test_the_policys_name_goes_upstream_in_train(engine, start, path, ask, streamed):
    with start(mode="record", model="policy") as gateway:
        for mode, expected in [(Mode.TRAIN, "policy"), (Mode.EVAL, "policy"), (Mode.RECORD, ask["model"])]:
            got = gateway.post(f"/s/{gateway.open(mode.value, mode=mode)}{path}", ask | {"stream": streamed})
            assert engine.received[-1].json["model"] == expected
            assert ask["model"].encode() in got.body
            assert b'"policy"' not in got.body
            assert gateway.call(mode.value).model == ask["model"]


@STREAMED
def test_the_policys_name_goes_upstream_in_chat_too(engine, start, streamed):
    with start(mode="train", model="policy") as gateway:
        got = gateway.chat(gateway.open(), model="gpt-4o", stream=streamed)
        assert engine.received[0].json["model"] == "policy"
        shown = got.events[:-1] if streamed else [got.json]
        assert {one["model"] for one in shown} == {"gpt-4o"}
        assert gateway.call().model == "gpt-4o"
        assert gateway.call().fidelity is Fidelity.EXACT


@BOTH_ASKS
@STREAMED
def test_passthrough_translates_and_keeps_nothing(engine, start, path, ask, streamed):
    with start(mode="passthrough") as gateway:
        headers = {"x-api-key": "sk-provider", "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        got = gateway.post(f"{path}?beta=true", ask | {"stream": streamed}, headers)
        assert got.status == 200
        if streamed:
            assert names(got)[-1] in ("message_stop", "response.completed")
        received = engine.received[0]
        assert (received.path, received.query) == (CHAT, "")
        assert received.headers["authorization"] == "Bearer sk-provider"
        assert not {"x-api-key", "anthropic-version", "anthropic-beta"} & received.headers.keys()
        assert "return_token_ids" not in received.json
        assert gateway.client.stats()["forwarded"] == 1
        assert gateway.store.calls_after(0) == []


def test_a_bearer_key_is_passed_on_as_it_is(engine, start):
    with start(mode="record") as gateway:
        gateway.post(MESSAGES, ASK, {"authorization": "Bearer sk-a", "x-api-key": "sk-b"})
        assert engine.received[0].headers["authorization"] == "Bearer sk-a"


@BOTH_ASKS
@pytest.mark.parametrize("mode", ["passthrough", "record"])
def test_an_upstream_that_speaks_the_dialect_gets_and_gives_its_own_bytes(engine, start, path, ask, mode):
    name = "anthropic_messages" if path == MESSAGES else "openai_responses"
    body = {
        MESSAGES: b'{"type": "message",  "content": [], "stop_reason": "end_turn", "usage": {}}',
        RESPONSES: b'{"object": "response",  "status": "completed", "output": []}',
    }[path]
    with start(mode=mode, upstream_dialects=["openai_chat", name]) as gateway:
        engine.answers.append(Answer(chunks=[body]))
        sent = json.dumps(ask, indent=1).encode()
        got = gateway.post(f"{path}?beta=true", sent, {"x-api-key": "sk-provider", "anthropic-version": "1"})
        assert (got.status, got.body) == (200, body)
        received = engine.received[0]
        assert (received.path, received.query, received.body) == (path, "beta=true", sent)
        assert (received.headers["x-api-key"], received.headers["anthropic-version"]) == ("sk-provider", "1")
        assert len(gateway.store.calls_after(0)) == (mode == "record")
        engine.answers.append(json_answer({"detail": "no"}, status=404))
        assert gateway.request("GET", f"{path}/x").status == 404  # the provider's other routes are its own
        assert engine.received[1].path == f"{path}/x"


def test_claude_code_finds_the_gateway_alive(engine, gateway):
    for path in ("/", f"/s/{gateway.open()}", f"/s/{gateway.open()}/"):
        assert gateway.request("HEAD", path).status == 200
    assert engine.received == []
