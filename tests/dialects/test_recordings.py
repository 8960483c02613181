"""What real harnesses send, through the translators: each request translates, each answer is one the SDKs take.

``data`` holds small requests of each harness's shape. Where the full recordings lie beside the checkout, they go the
same way.
"""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from dialects.chat_streams import call_delta, calls, chunk, end, http, plain
from outrider.dialects import anthropic_reply, openai_responses_reply
from outrider.dialects.anthropic_request import count_to_chat
from outrider.dialects.anthropic_request import to_chat as messages_to_chat
from outrider.dialects.openai_responses_request import to_chat as responses_to_chat

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "recordings"
FILES = sorted(DATA.glob("*.jsonl")) + sorted(SHARED.glob("*.jsonl"))
CALL = {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command": "echo hi"}'}


class AnyResponse:
    """Stands for the server's memory: whatever response is named, it was the call that followed this question."""

    def items(self, response_id):
        return [{"role": "user", "content": "run echo hi"}, CALL]


def translations(file):
    """Each recorded request of a translated dialect with its path and translation."""
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        path, body = record["path"], record["body"]
        if not isinstance(body, dict):
            continue
        if path.endswith("/messages"):
            found.append((path, messages_to_chat(body)))
        elif path.endswith("/messages/count_tokens"):
            found.append((path, count_to_chat(body)))
        elif path.endswith("/responses"):
            found.append((path, responses_to_chat(body, history=AnyResponse())))
    return found


def test_the_fixtures_are_there():
    assert sum(len(translations(file)) for file in DATA.glob("*.jsonl")) == 18


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_request_translates_and_every_second_turn_extends_the_first(file):
    before = []
    for _, translation in translations(file):
        messages = translation.request["messages"]
        roles = [message["role"] for message in messages]
        assert set(roles) <= {"system", "user", "assistant", "tool"}
        assert "system" not in roles[1:2]
        for message in messages:
            assert isinstance(message["content"], str)
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
        names = [tool["function"]["name"] for tool in translation.request.get("tools", ())]
        assert len(names) == len(set(names))
        assert not any("billing-header" in message["content"] for message in messages)
        if "tool" in roles:
            assert any(messages[: len(head)] == head and tools == names for head, tools in before)
        before.append((messages, names))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_request_gets_an_answer_that_its_sdk_takes(file):
    for path, translation in translations(file):
        if path.endswith("/messages"):
            _messages_answer(translation)
        elif path.endswith("/responses"):
            _responses_answer(translation)


def _answers(translation):
    """An answer that calls the first tool, where there is one, plain and streamed."""
    tools = translation.request.get("tools")
    name = tools[0]["function"]["name"] if tools else ""
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": '{"input": "x"}'}}
    message = {"content": "Hi", "reasoning": "hm"} | ({"tool_calls": [call]} if tools else {})
    chunks = [chunk({"reasoning": "hm"}, prompt_token_ids=[1]), chunk({"content": "Hi"})]
    if tools:
        chunks += [calls(call_delta(0, "c", name, "")), calls(call_delta(0, args='{"input": "x"}'))]
    finish = "tool_calls" if tools else "stop"
    return plain(message, finish), [*chunks, *end(finish)]


def _messages_answer(translation):
    reply, chunks = _answers(translation)
    message = anthropic_reply.from_chat(reply, translation.state)
    Message.model_validate(message)
    sdk = anthropic.Anthropic(
        api_key="k",
        base_url="http://gateway.test",
        http_client=_answering(anthropic_reply.MessagesStream(translation.state), chunks),
    )
    with sdk.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]) as stream:
        found = stream.get_final_message().to_dict()
    assert (found["content"], found["stop_reason"]) == (message["content"], message["stop_reason"])


def _responses_answer(translation):
    reply, chunks = _answers(translation)
    response = openai_responses_reply.from_chat(reply, translation.state)
    Response.model_validate(response)
    sdk = openai.OpenAI(
        api_key="k",
        base_url="http://gateway.test/v1",
        http_client=_answering(openai_responses_reply.ResponsesStream(translation.state), chunks),
    )
    with sdk.responses.stream(model="m", input="go") as stream:
        found = stream.get_final_response()
    assert [item.id for item in found.output] == [item["id"] for item in response["output"]]
    assert found.output_text == "Hi"


def _answering(translator, chunks):
    content = b"".join([event for one in chunks for event in translator.feed(one)] + translator.finish())

    def handle(request):
        return http.Response(200, headers={"content-type": "text/event-stream"}, content=content)

    return http.Client(transport=http.MockTransport(handle))
