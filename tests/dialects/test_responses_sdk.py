"""The openai SDK against the translator: its types take the answers, its accumulator puts streams together."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from dialects.chat_streams import as_chunks, as_plain, call_delta, calls, chunk, end, http, messages, plain, run
from outrider.dialects.openai_responses_history import RecentResponses
from outrider.dialects.openai_responses_reply import ResponsesStream, conversation, from_chat
from outrider.dialects.openai_responses_request import to_chat

TOOLS = [
    {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "function", "name": "eager", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "patch"},
]
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"file": "a"}'}}
EVENT = TypeAdapter(ResponseStreamEvent)


def client(answer, history=None):
    def handle(request):
        body = json.loads(request.content)
        translation = to_chat(body, history=history)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return http.Response(200, headers={"content-type": kind}, content=answer(translation))

    transport = http.MockTransport(handle)
    return openai.OpenAI(
        api_key="k", base_url="http://gateway.test/v1", max_retries=0, http_client=http.Client(transport=transport)
    )


def streamed(chunks):
    def answer(translation):
        translator = ResponsesStream(translation.state)
        return b"".join([event for one in chunks for event in translator.feed(one)] + translator.finish())

    return answer


def test_a_plain_answer_is_what_the_types_say():
    reply = plain({"content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]}, "tool_calls")

    def answer(translation):
        response = from_chat(reply, translation.state)
        Response.model_validate(response)
        return json.dumps(response).encode()

    response = client(answer).responses.create(model="m", input="go", tools=TOOLS)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Hi"
    assert response.usage.total_tokens == 14


def test_a_streamed_answer_is_put_together():
    chunks = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "hm"}),
        chunk({"content": "H"}),
        chunk({"content": "i"}),
        calls(call_delta(0, "c1", "read", "")),
        calls(call_delta(0, args='{"file":"a"}')),
        calls(call_delta(1, "c2", "patch", '{"input": "+x"}')),
        *end("tool_calls"),
    ]
    with client(streamed(chunks)).responses.stream(model="m", input="go", tools=TOOLS) as stream:
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert response.output_text == "Hi"
    assert (response.output[2].arguments, response.output[3].input) == ('{"file":"a"}', "+x")


@pytest.mark.parametrize("more", [{}, {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"]}])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_every_event_is_what_the_types_say(more, finish):
    state = to_chat({"model": "m", "input": "go", "tools": TOOLS, **more}).state
    chunks = [
        chunk({"reasoning": "hm"}),
        chunk({"content": "Hi"}),
        chunk({"refusal": "No."}),
        calls(call_delta(0, "c1", "read", "{}")),
        calls(call_delta(1, "c2", "patch", '{"input": "+x"}')),
        *end(finish),
    ]
    for event in run(ResponsesStream(state), chunks):
        EVENT.validate_python(event)
    for event in run(ResponsesStream(state), [{"error": "dead"}]):
        EVENT.validate_python(event)


def test_a_conversation_by_previous_response_id():
    seen = []
    history = RecentResponses().of("me")
    replies = [plain({"content": None, "tool_calls": [CALL]}, "tool_calls"), plain({"content": "Done."})]

    def answer(translation):
        seen.append(translation.request["messages"])
        response = from_chat(replies[len(seen) - 1], translation.state)
        history.keep(response["id"], conversation(translation.state, response))
        return json.dumps(response).encode()

    sdk = client(answer, history)
    first = sdk.responses.create(model="m", input="go", tools=TOOLS)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "x"}
    sdk.responses.create(model="m", input=[output], previous_response_id=first.id, tools=TOOLS)
    assert seen[1] == [
        *seen[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


def test_a_conversation_replayed_by_the_client_extends_itself():
    seen = []
    replies = [
        plain({"content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]}, "tool_calls"),
        plain({"content": "Done."}),
    ]

    def answer(translation):
        seen.append(translation.request["messages"])
        return json.dumps(from_chat(replies[len(seen) - 1], translation.state)).encode()

    sdk = client(answer)
    asked = {"model": "m", "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}
    items = [{"role": "user", "content": "go"}]
    first = sdk.responses.create(input=items, **asked)
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": "c", "output": "x"})
    sdk.responses.create(input=items, **asked)
    assert seen[1] == [
        *seen[0],
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), message=messages)
def test_streamed_and_plain_answers_are_the_same(data, message):
    state = to_chat({"model": "m", "input": "go", "tools": TOOLS}).state
    expected = from_chat(as_plain(message), state)
    chunks = data.draw(as_chunks(message))
    events = run(ResponsesStream(state), chunks)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == expected
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"]
    assert added == done == [item["id"] for item in expected["output"]]
    assert _joined(events) == [_text(item) for item in expected["output"]]


def _joined(events):
    """The text of each item as its deltas give it."""
    texts = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            texts[event["output_index"]] = ""
        elif event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    return [texts[index] for index in sorted(texts)]


def _text(item):
    if item["type"] == "function_call":
        return item["arguments"]
    return item["input"] if item["type"] == "custom_tool_call" else item["content"][0]["text"]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), message=messages)
def test_the_accumulator_takes_any_stream(data, message):
    chunks = data.draw(as_chunks(message | {"finish_reason": "stop"}))
    with client(streamed(chunks)).responses.stream(model="m", input="go", tools=TOOLS) as stream:
        response = stream.get_final_response()
    shown = [bool(message["reasoning"]), bool(message["text"]), *(True for _ in message["calls"])]
    assert len(response.output) == sum(shown)
