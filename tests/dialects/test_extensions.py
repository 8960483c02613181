"""Fields that a protocol doesn't know, in both directions of a translation: the client's go to the engine, and the
engine's to the client, whose SDK takes them."""

from __future__ import annotations

import json
from typing import get_type_hints

import anthropic
import msgspec
import openai
import pytest
from anthropic.types import Message, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types.chat import ChatCompletion, completion_create_params
from openai.types.responses import Response, response_create_params

from dialects.chat_streams import chunk, end, http, plain
from outrider.dialects import anthropic_reply, anthropic_request, openai_responses_reply, openai_responses_request
from outrider.dialects import translate_stream as chat
from outrider.dialects.anthropic_messages import AnthropicMessages
from outrider.dialects.openai_responses import OpenAIResponses
from outrider.dialects.translate import NO_EXTENSIONS
from outrider.gateway.sse import parse_event

# As vLLM, SGLang and llama.cpp know them; the last two are nobody's.
EXTENSIONS = {
    "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}, "structured_outputs": {"regex": "x"},
    "guided_json": {"type": "object"}, "priority": -3, "cache_salt": "s", "bad_words": ["x"], "seed": 7,
    "repetition_penalty": 1.1, "stop_token_ids": [2], "ignore_eos": False, "min_tokens": 1, "logit_bias": {"5": -100},
    "presence_penalty": 0.5, "kv_transfer_params": {"do_remote_decode": True}, "separate_reasoning": True,
    "cache_prompt": True, "x_future": {"a": [1, None, 2.5]}, "x_null": None,
}  # fmt: skip
DIALECTS = {"messages": AnthropicMessages(), "responses": OpenAIResponses()}
ASKS = {
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}]},
    "responses": {"model": "m", "input": "go"},
}
BOTH = pytest.mark.parametrize("name", sorted(DIALECTS))
STREAMED = pytest.mark.parametrize("streamed", [False, True])
TIMINGS = {"predicted_ms": 1.5, "predicted_n": 5}


def prepared(name, **fields):
    dialect = DIALECTS[name]
    request = dialect.parse(json.dumps(ASKS[name] | fields).encode())
    found = dialect.prepare(request, overrides={}, tokens=False)
    return json.loads(found.body), found.translation.notes


# -- requests ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("streamed", [False, True])
def test_a_field_of_the_engine_travels_on_as_it_is(name, streamed):
    plainly, _ = prepared(name, stream=streamed)
    sent, notes = prepared(name, stream=streamed, **EXTENSIONS)
    assert sent == plainly | EXTENSIONS
    assert notes == ()


@BOTH
def test_what_the_translation_says_itself_is_not_overwritten(name):
    mine = {"messages": [1], "n": 3, "stream_options": {"include_usage": False}, "prompt": "x", "functions": [{}]}
    mine.pop("messages" if name == "messages" else "prompt")  # the protocol's own
    plainly, _ = prepared(name)
    sent, notes = prepared(name, **mine)
    assert sent == plainly
    assert set(notes) == {f"field: {field}" for field in mine}


def test_two_words_for_one_thing_are_not_both_sent():
    sent, notes = prepared("messages", stop_sequences=["A"], stop=["B"])
    assert sent["stop"] == ["A"]
    assert notes == ("field: stop",)
    sent, notes = prepared("messages", stop=["B"])
    assert (sent["stop"], notes) == (["B"], ())


@BOTH
def test_a_field_that_chat_has_no_word_for_is_noted_by_name(name):
    unspoken = {"messages": anthropic_request, "responses": openai_responses_request}[name].UNSPOKEN
    plainly, _ = prepared(name)
    sent, notes = prepared(name, **{field: {"x": 1} for field in sorted(unspoken)})
    assert sent == plainly
    assert notes == tuple(f"field: {field}" for field in sorted(unspoken))
    _, notes = prepared(name, **dict.fromkeys(sorted(unspoken), None))
    assert notes == ()


def test_every_field_of_the_sdks_is_known():
    """What an SDK has a parameter for is no extension, whatever an engine calls so."""
    anthropics = anthropic_request.SPOKEN | anthropic_request.UNSPOKEN
    for params in (
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsStreaming,
        beta_count_params.MessageCountTokensParams,
    ):
        assert get_type_hints(params).keys() <= anthropics
    responses = openai_responses_request.SPOKEN | openai_responses_request.UNSPOKEN
    assert get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys() <= responses
    assert not anthropic_request.SPOKEN & anthropic_request.UNSPOKEN
    assert not openai_responses_request.SPOKEN & openai_responses_request.UNSPOKEN
    chats = get_type_hints(completion_create_params.CompletionCreateParamsStreaming).keys()
    assert NO_EXTENSIONS - chats == {"prompt", "echo", "suffix"}


def test_every_field_of_the_sdks_answers_is_known():
    assert set(ChatCompletion.model_fields) <= chat.SPOKEN
    anthropics = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert set(Message.model_fields) | anthropics <= anthropic_reply.FIELDS
    state = prepared_state("responses")
    ours = openai_responses_reply.from_chat(plain({"content": "x"}), state).keys()
    assert set(Response.model_fields) <= ours | openai_responses_reply.FIELDS


def test_a_tool_that_anthropic_runs_may_be_called_anything():
    """Its name is nobody's business, whatever type it has; it was looked at, and a list is no name."""
    hosted = {"type": "bash_20250124", "name": [], "eager_input_streaming": True}
    _, notes = prepared("messages", tools=[hosted])
    assert notes == ("hosted tool: bash_20250124",)


def prepared_state(name, **fields):
    dialect = DIALECTS[name]
    request = dialect.parse(json.dumps(ASKS[name] | fields).encode())
    return dialect.prepare(request, overrides={}, tokens=False).translation.state


# -- answers -----------------------------------------------------------------------------------------------------------


def answering(chunks, whole):
    """An HTTP client that gets this answer from the dialect that it asks."""

    def handle(request):
        body = json.loads(request.content)
        name = "messages" if request.url.path.endswith("/messages") else "responses"
        dialect = DIALECTS[name]
        reader = dialect.reader(dialect.prepare(dialect.parse(request.content), overrides={}, tokens=True))
        if not body.get("stream"):
            content = reader.body(msgspec.json.encode(whole))
            return http.Response(200, headers={"content-type": "application/json"}, content=content)
        lines = [b"data: " + msgspec.json.encode(one) + b"\n\n" for one in chunks]
        content = b"".join(reader.event(parse_event(line)) for line in lines) + reader.end()
        return http.Response(200, headers={"content-type": "text/event-stream"}, content=content)

    return http.Client(transport=http.MockTransport(handle))


def extra(found):
    """What the SDK's types don't know of an answer; OpenAI's own `store` is not in its SDK."""
    return {name: value for name, value in found.model_extra.items() if name != "store"}


def ask(name, chunks, whole, streamed, **fields):
    http_client = answering(chunks, whole)
    asked = ASKS[name]
    if name == "messages":
        client = anthropic.Anthropic(api_key="k", base_url="http://gw.test", max_retries=0, http_client=http_client)
        if not streamed:
            return client.messages.create(**asked, extra_body=fields), []
        with client.messages.stream(**asked, extra_body=fields) as stream:
            events = list(stream)
            return stream.get_final_message(), events
    client = openai.OpenAI(api_key="k", base_url="http://gw.test/v1", max_retries=0, http_client=http_client)
    if not streamed:
        return client.responses.create(**asked, extra_body=fields), []
    with client.responses.stream(**asked, extra_body=fields) as stream:
        events = list(stream)
        return stream.get_final_response(), events


@BOTH
@STREAMED
def test_the_engines_own_fields_reach_the_sdk(name, streamed):
    own = {"kv_transfer_params": {"a": 1}, "weight_version": "v3"}
    first, *rest = [chunk({"role": "assistant", "content": "Hi"}), *end()]
    found, _ = ask(name, [first | own, *rest], plain({"content": "Hi"}) | own, streamed)
    assert extra(found) == own
    assert found.model == "m"


@BOTH
@STREAMED
def test_fields_that_come_at_the_end_do_too(name, streamed):
    first = {"weight_version": "v3", "prompt_token_ids": [1]}  # with ids, so that a message can begin at once
    chunks = [chunk({"role": "assistant", "content": "Hi"}) | first, *end()]
    chunks[-1] |= {"timings": TIMINGS, "weight_version": "v3"}
    whole = plain({"content": "Hi"}) | {"weight_version": "v3", "timings": TIMINGS}
    found, events = ask(name, chunks, whole, streamed)
    if name == "messages" and streamed:  # its SDK takes of the last event what it knows
        assert extra(found) == {"weight_version": "v3"}
        last = next(event for event in events if event.type == "message_delta")
        assert last.model_extra == {"timings": TIMINGS}
    else:
        assert extra(found) == {"weight_version": "v3", "timings": TIMINGS}


@BOTH
@STREAMED
def test_nothing_of_the_engine_takes_the_place_of_the_protocols_own(name, streamed):
    """An engine's field may have the name of one of the client's protocol, or say nothing at all."""
    own = {
        "type": "x", "role": "x", "content": "x", "stop_reason": "x", "stop_sequence": "x", "container": "x",
        "output": "x", "status": "x", "instructions": "x", "output_text": "x", "conversation": "x", "event": None,
        "prompt_logprobs": None, "system_fingerprint": "fp", "service_tier": "priority", "message": "x", "delta": "x",
    }  # fmt: skip
    chunks = [one | own for one in [chunk({"role": "assistant", "content": "Hi"}), *end()]]
    found, _ = ask(name, chunks, plain({"content": "Hi"}) | own, streamed)
    foreign = {"messages": ("output", "status", "instructions", "output_text", "conversation")}.get(
        name, ("type", "role", "content", "stop_reason", "stop_sequence", "container", "message", "delta")
    )
    assert extra(found) == dict.fromkeys(foreign, "x")
    if name == "messages":
        assert (found.content[0].text, found.stop_reason, found.role) == ("Hi", "end_turn", "assistant")
    else:
        assert (found.output_text, found.status) == ("Hi", "completed")


@BOTH
@STREAMED
def test_ids_that_only_the_gateway_asked_for_are_not_told(name, streamed):
    chunks = [chunk({"role": "assistant", "content": "Hi"}) | {"prompt_token_ids": [1, 2]}, *end()]
    whole = plain({"content": "Hi"}) | {"prompt_token_ids": [1, 2]}
    found, _ = ask(name, chunks, whole, streamed)
    assert extra(found) == {}
    found, _ = ask(name, chunks, whole, streamed, return_token_ids=True)
    assert extra(found) == {"prompt_token_ids": [1, 2]}


@BOTH
def test_a_field_that_nests_too_deeply_ends_the_answer_as_an_error(name):
    """What could just be read can't always be written again."""
    dialect = DIALECTS[name]
    ask = json.dumps(ASKS[name] | {"stream": True}).encode()
    for depth in range(100, 1100):
        reader = dialect.reader(dialect.prepare(dialect.parse(ask), overrides={}, tokens=True))
        deep = b'data: {"x":' + b"[" * depth + b"]" * depth + b',"choices":[]}\n\n'
        told = reader.event(parse_event(deep)) + reader.end()
        assert reader.error
        assert told.count(b"event: error") == (name == "messages")
        assert told.count(b"event: response.failed") == (name == "responses")
