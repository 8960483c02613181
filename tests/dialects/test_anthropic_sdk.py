"""The anthropic SDK against the translator: its types take the answers, its accumulator puts streams together."""

from __future__ import annotations

import json

import anthropic
import msgspec
import pytest
from anthropic.types import Message
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dialects.chat_streams import as_chunks, as_plain, call_delta, calls, chunk, end, http, messages, plain
from outrider.dialects.anthropic_messages import AnthropicMessages
from outrider.dialects.anthropic_reply import MessagesStream, from_chat
from outrider.dialects.anthropic_request import MessagesState, to_chat

DIALECT = AnthropicMessages()


def client(answer, seen=None):
    """A client whose requests get ``answer(state)``; `seen` gets the messages of each."""

    def handle(request):
        body = json.loads(request.content)
        translation = to_chat(body)
        if seen is not None:
            seen.append(translation.request["messages"])
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return http.Response(200, headers={"content-type": kind}, content=answer(translation.state))

    transport = http.MockTransport(handle)
    return anthropic.Anthropic(
        api_key="k", base_url="http://gateway.test", max_retries=0, http_client=http.Client(transport=transport)
    )


def streamed(chunks):
    def answer(state):
        translator = MessagesStream(state)
        return b"".join([event for one in chunks for event in translator.feed(one)] + translator.finish())

    return answer


def whole(reply):
    return lambda state: json.dumps(from_chat(reply, state)).encode()


ASK = {"model": "claude", "max_tokens": 64, "messages": [{"role": "user", "content": "go"}]}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "patch")]
TOOLS.append({"name": "eager", "input_schema": {"type": "object"}, "eager_input_streaming": True})
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"file": "a"}'}}


def test_a_plain_answer_is_what_the_types_say():
    reply = plain({"content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]}, "tool_calls")
    message = client(whole(reply)).messages.create(**ASK, tools=TOOLS)
    Message.model_validate(message.to_dict())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"file": "a"}
    assert message.stop_reason == "tool_use"
    assert message.usage.input_tokens == 5


def test_a_streamed_answer_is_put_together():
    chunks = [
        chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2]),
        chunk({"reasoning": "hm"}),
        chunk({"content": "Hi"}),
        calls(call_delta(0, "c", "read", "")),
        calls(call_delta(0, args='{"file":')),
        calls(call_delta(0, args='"a"}')),
        *end("tool_calls"),
    ]
    with client(streamed(chunks)).messages.stream(**ASK, tools=TOOLS) as stream:
        seen = [event.type for event in stream]
        message = stream.get_final_message()
    assert seen.count("content_block_start") == seen.count("content_block_stop") == 3
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[0].signature
    assert message.content[2].input == {"file": "a"}
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 5, 5)


@pytest.mark.parametrize("arguments", ["", "{}", "{bad", '{"a": 1'])
def test_A01_the_accumulator_takes_any_input(arguments):
    chunks = [calls(call_delta(0, "c", "read", arguments)), *end("tool_calls")]
    with client(streamed(chunks)).messages.stream(**ASK, tools=TOOLS) as stream:
        assert isinstance(stream.get_final_message().content[0].input, dict)


def test_S09_an_error_inside_the_stream_raises():
    chunks = [chunk({"content": "x"}, usage={"prompt_tokens": 1}), {"error": {"message": "engine dead"}}]
    with (
        client(streamed(chunks)).messages.stream(**ASK) as stream,
        pytest.raises(anthropic.APIStatusError, match="engine dead"),
    ):
        stream.get_final_message()


def test_R11_an_overflow_is_a_bad_request():
    def handle(request):
        return http.Response(400, content=DIALECT.error(400, "prompt is too long: 9 tokens > 8 maximum"))

    sdk = anthropic.Anthropic(
        api_key="k", base_url="http://gateway.test", http_client=http.Client(transport=http.MockTransport(handle))
    )
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9 tokens > 8 maximum"):
        sdk.messages.create(**ASK)


def test_a_conversation_through_the_sdk_extends_itself():
    """What the SDK gave is sent back as it is; the chat history of one turn is the head of the next one's."""
    seen = []
    replies = [
        plain({"content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]}, "tool_calls"),
        plain({"content": "Done."}),
    ]

    sdk = client(lambda state: whole(replies[len(seen) - 1])(state), seen)
    history = list(ASK["messages"])
    first = sdk.messages.create(**ASK | {"messages": history}, tools=TOOLS)
    history.append({"role": "assistant", "content": first.content})
    history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]})
    sdk.messages.create(**ASK | {"messages": history}, tools=TOOLS)
    assert seen[1] == [
        *seen[0],
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), message=messages)
def test_streamed_and_plain_answers_are_the_same(data, message):
    state = MessagesState(id="msg_1", model="claude", eager_tools=frozenset({"eager"}))
    expected = from_chat(as_plain(message), state)
    Message.model_validate(expected)
    chunks = data.draw(as_chunks(message))
    assume(all(name != "eager" or is_object(args) for name, args in message["calls"]))  # else shown as it was written
    with client(lambda _: streamed(chunks)(state)).messages.stream(**ASK) as stream:
        found = stream.get_final_message().to_dict()
    found.pop("stop_details")  # the accumulator's own
    assert found == expected


def is_object(text):
    try:
        return isinstance(msgspec.json.decode(text or "{}"), dict)  # json takes Infinity
    except msgspec.DecodeError:
        return False
