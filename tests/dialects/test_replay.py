"""What real harnesses send, through a gateway in each dialect: the SDKs' own types take every answer.

``data`` holds small requests of each harness's shape. Where the full recordings lie beside the checkout, they go the
same way. Each request is asked plain and streamed, answered with text and, where it offers tools, with a call.
"""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import Message, MessageTokensCount
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fakes.engine import Sampled, ScriptedEngine
from fakes.gateway import Host, HostedGateway, wait_for
from outrider.types import Fidelity

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "recordings"
FILES = sorted(DATA.glob("*.jsonl")) + sorted(SHARED.glob("*.jsonl"))
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
EVENT = TypeAdapter(ResponseStreamEvent)
ARGUMENTS = '{"command":  "echo hi", "input": "x"}'


class CallingEngine(ScriptedEngine):
    """Calls the first of the tools that it is offered; says some words where it is offered none, or told to."""

    words_only = False

    def default(self, received):
        tools = received.json.get("tools")
        self.sampled = [Sampled()]
        if tools and not self.words_only:
            function = {"name": tools[0]["function"]["name"], "arguments": ARGUMENTS}
            call = {"id": "call_9", "type": "function", "function": function}
            self.sampled = [Sampled(pieces=["", ""], ids=[8, 2], logprobs=[-1, -2], finish_reason="tool_calls",
                                    tool_calls=[call])]  # fmt: skip
        return super().default(received)


@pytest.fixture(scope="module")
def host():
    host = Host()
    yield host
    host.stop()


@pytest.fixture(scope="module")
def engine():
    with CallingEngine() as engine:
        yield engine


def requests_of(file):
    """Route and body of each model call; the last `previous_response_id` is left for `Replay` to fill in."""
    for line in file.read_text().splitlines():
        one = json.loads(line)
        if one["path"] in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT) and isinstance(one["body"], dict):
            yield (
                one["path"],
                {key: value for key, value in one["body"].items() if key not in ("stream", "stream_options")},
            )


class Replay:
    """Asks through one attempt's key, with the SDKs, which check nothing by themselves: so their types do."""

    def __init__(self, gateway, key):
        url = f"{gateway.base_url}/s/{key}"
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="k", max_retries=0)
        self.asked = 0
        self._last_response = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.openai.close()
        self.anthropic.close()

    def ask(self, route, body, streamed):
        """What the model said, in one form for all dialects: texts, and calls with their arguments."""
        self.asked += route != COUNT
        return {CHAT: self.chat, COMPLETIONS: self.completions, RESPONSES: self.responses, MESSAGES: self.messages}[
            route
        ](body, streamed)

    def chat(self, body, streamed):
        create = self.openai.chat.completions
        if streamed:
            raw = [part.to_dict() for part in create.create(extra_body=body, model="m", messages=[], stream=True)]
            for part in raw:
                ChatCompletionChunk.model_validate(part, strict=True)
            self.asked += 1
            with create.stream(extra_body=body, model="m", messages=[]) as chunks:
                answer = chunks.get_final_completion()
        else:
            answer = create.create(extra_body=body, model="m", messages=[])
            ChatCompletion.model_validate(answer.to_dict(), strict=True)
        assert len(answer.choices) == (body.get("n") or 1)
        if body.get("logprobs"):
            assert [len(choice.logprobs.content) for choice in answer.choices] == [len(Sampled().ids)] * body["n"]
        message = answer.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content or "", calls

    def completions(self, body, streamed):
        if not streamed:
            answer = self.openai.completions.create(extra_body=body, model="m", prompt="")
            Completion.model_validate(answer.to_dict(), strict=True)
            return answer.choices[0].text, []
        parts = list(self.openai.completions.create(extra_body=body, model="m", prompt="", stream=True))
        for part in parts:
            whole = part.to_dict()
            for choice in whole["choices"]:  # in a stream OpenAI sends null until the end, whatever the type says
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate(whole, strict=True)
        first = [choice for part in parts for choice in part.choices if choice.index == 0]
        assert first[-1].finish_reason == "stop"
        return "".join(choice.text for choice in first), []

    def responses(self, body, streamed):
        if body.get("previous_response_id"):
            body = body | {"previous_response_id": self._last_response}
        if streamed:
            raw = self.openai.responses.create(extra_body=body, model="m", input="x", stream=True)
            for number, event in enumerate(raw):
                EVENT.validate_python(event.to_dict())
                assert event.sequence_number == number
            self.asked += 1
            with self.openai.responses.stream(extra_body=body, model="m", input="x") as events:
                answer = events.get_final_response()
        else:
            answer = self.openai.responses.create(extra_body=body, model="m", input="x")
        Response.model_validate(answer.to_dict())
        self._last_response = answer.id
        calls = [
            (item.name, item.arguments if item.type == "function_call" else item.input)
            for item in answer.output
            if item.type in ("function_call", "custom_tool_call")
        ]
        return answer.output_text, calls

    def messages(self, body, streamed):
        if streamed:
            with self.anthropic.messages.stream(max_tokens=9, model="m", messages=[], extra_body=body) as events:
                answer = events.get_final_message()
        else:
            answer = self.anthropic.post(MESSAGES, body=body, cast_to=Message)
        Message.model_validate(answer.to_dict(), strict=True)
        calls = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
        return "".join(block.text for block in answer.content if block.type == "text"), calls

    def count(self, body):
        counted = self.anthropic.post(COUNT, body=body, cast_to=MessageTokensCount)
        MessageTokensCount.model_validate(counted.to_dict(), strict=True)
        return counted.input_tokens


def as_completion(body):
    """The same words as a prompt, for the dialect that no agent speaks any more."""
    said = json.dumps(body["messages"])
    return {"model": body["model"], "prompt": said} | {key: body[key] for key in ("stop", "seed", "n") if key in body}


def test_the_fixtures_are_there():
    found = [route for file in sorted(DATA.glob("*.jsonl")) for route, _ in requests_of(file)]
    assert {route: found.count(route) for route in sorted(set(found))} == {
        CHAT: 14, COMPLETIONS: 2, MESSAGES: 7, COUNT: 1, RESPONSES: 10,
    }  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_request_is_answered_in_a_form_that_its_sdk_takes(host, engine, tmp_path, file):
    engine.forget()
    with (
        HostedGateway(host, engine, tmp_path / "s.sqlite3", mode="train", model="policy") as gateway,
        Replay(gateway, gateway.open()) as replay,
    ):
        for route, body in requests_of(file):
            if route in (MESSAGES, COUNT):
                assert replay.count(body) == 3
            if route == CHAT:
                completion = as_completion(body)
                for streamed in (False, True):
                    replay.asked += 1
                    assert replay.completions(completion, streamed)[0] == Sampled().text
            if route != COUNT:
                answered_both_ways(engine, replay, route, body)
        wait_for(lambda: len(gateway.store.calls("attempt-1")) == replay.asked)
        assert {call.fidelity for call in gateway.store.calls("attempt-1")} <= {Fidelity.EXACT}


def answered_both_ways(engine, replay, route, body):
    offers = bool(body.get("tools")) or any(item.get("type") == "additional_tools" for item in items(body))
    for engine.words_only in (False, True):
        plain, streamed = replay.ask(route, body, False), replay.ask(route, body, True)
        assert plain == streamed
        text, calls = plain
        if engine.words_only or not offers:
            assert (text, calls) == (Sampled().text, [])
        else:
            assert len(calls) == 1
            assert calls[0][1] in (ARGUMENTS, json.loads(ARGUMENTS), "x")


def items(body):
    given = body.get("input")
    return [item for item in given if isinstance(item, dict)] if isinstance(given, list) else []
