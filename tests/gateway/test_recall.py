"""`previous_response_id` after a restart and at another gateway, and what it must never find."""

from __future__ import annotations

import contextlib
import json

import openai
import pytest

from fakes.chat_format import write_format
from fakes.engine import Answer, Sampled
from fakes.gateway import RunningGateway
from fakes.token_engine import TokenEngine
from outrider.gateway.recall import is_own_call, new_call_id
from outrider.renderers.template import TemplateRenderer
from outrider.types import CallState

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"file":  "a"}'}}
CALLING = Sampled(pieces=["", ""], ids=[8, 2], logprobs=[-1.0, -2.0], finish_reason="tool_calls", tool_calls=[CALL])
STREAMED = pytest.mark.parametrize("streamed", [False, True])


def sdk(gateway, key):
    return openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="sk-nothing", max_retries=0)


def respond(gateway, key, streamed=False, **asked):
    with sdk(gateway, key) as client:
        if not streamed:
            return client.responses.create(model="m", **asked)
        with client.responses.stream(model="m", **asked) as events:
            return events.get_final_response()


def begin(gateway, engine, key, streamed=False):
    """Two turns with a tool between them; returns the last response."""
    engine.sampled = [CALLING]
    first = respond(gateway, key, streamed, input="go", tools=[TOOL])
    engine.sampled = [Sampled()]
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "ok"}
    return respond(gateway, key, streamed, input=[output], tools=[TOOL], previous_response_id=first.id)


@STREAMED
def test_a_conversation_goes_on_after_a_restart(engine, start, streamed):
    with start(mode="train") as gateway:
        key = gateway.open()
        last = begin(gateway, engine, key, streamed)
    with start(mode="train") as gateway:
        respond(gateway, key, streamed, input="more", previous_response_id=last.id)
    messages = engine.received[-1].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[:3] == engine.received[-2].json["messages"]
    assert messages[1]["tool_calls"] == [CALL]
    assert messages[3]["content"] == Sampled().text


def test_an_answer_with_space_before_it_is_found_too(engine, start):
    body = {"choices": [{"index": 0, "message": {"content": "spaced"}, "finish_reason": "stop"}]}
    engine.answers.append(Answer(chunks=[b"\r\n  " + json.dumps(body).encode()]))
    with start(mode="train") as gateway:
        key = gateway.open()
        first = respond(gateway, key, input="go")
    with start(mode="train") as gateway:
        respond(gateway, key, input="more", previous_response_id=first.id)
    assert engine.received[-1].json["messages"][1]["content"] == "spaced"


def test_gateways_on_one_store_know_each_others_answers(engine, tmp_path):
    store = tmp_path / "s.sqlite3"
    with RunningGateway(engine, store, mode="train") as one, RunningGateway(engine, store, mode="train") as other:
        key = one.open()
        response = respond(one, key, input="0")
        for turn in range(1, 5):
            response = respond([one, other][turn % 2], key, input=str(turn), previous_response_id=response.id)
    said = [message["content"] for message in engine.received[-1].json["messages"] if message["role"] == "user"]
    assert said == ["0", "1", "2", "3", "4"]


@STREAMED
def test_answers_whose_prompt_was_made_here_are_found_too(start, tmp_path, streamed):
    folder = write_format(tmp_path / "qwen", "qwen")
    renderer = TemplateRenderer(folder)
    with TokenEngine(renderer) as engine:
        options = {"mode": "train", "tokenizer": str(folder), "upstream": engine.base_url}
        engine.says.append(renderer.text.encode("ok<|im_end|>"))
        with start(**options) as gateway:
            key = gateway.open()
            first = respond(gateway, key, streamed, input="go")
        last = first.id
        for turn in range(2, 5):
            with start(**options) as gateway:
                last = respond(gateway, key, streamed, input="more", previous_response_id=last).id
                calls = gateway.recorded(turn)
    assert [call.continuation for call in calls] == ["opened", "continued", "continued", "continued"]


def test_turns_that_alternate_between_gateways_are_one_branch(tmp_path):
    folder = write_format(tmp_path / "qwen", "qwen")
    renderer = TemplateRenderer(folder)
    with TokenEngine(renderer) as engine:
        engine.says.append(renderer.text.encode("ok<|im_end|>"))
        options = {"mode": "train", "tokenizer": str(folder)}
        store = tmp_path / "s.sqlite3"
        with RunningGateway(engine, store, **options) as one, RunningGateway(engine, store, **options) as other:
            key = one.open()
            messages, previous = [], None
            for turn in range(8):
                gateway = [one, other][turn % 2]
                messages.append({"role": "user", "content": str(turn)})
                messages.append(gateway.chat(key, messages=messages).json["choices"][0]["message"])
            for turn in range(6):
                asked = {"input": f"again {turn}"} | ({"previous_response_id": previous} if previous else {})
                previous = respond([one, other][turn % 2], key, **asked).id
            outcomes = [call.continuation for call in one.recorded(14)]
    assert outcomes == ["opened", *["continued"] * 7, "opened", *["continued"] * 5]


def test_a_response_that_nobody_gave_is_404_in_openais_shape(engine, gateway):
    key = gateway.open()
    for named in ("resp_" + "0" * 48, "resp_", "resp_x", "msg_1", new_call_id("attempt:attempt-1")):
        with pytest.raises(openai.NotFoundError) as caught:
            respond(gateway, key, input="x", previous_response_id=named)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert caught.value.body["type"] == "invalid_request_error"
        assert named in caught.value.message
    assert engine.received == []


@pytest.mark.parametrize("mode", ["train", "record"])
@pytest.mark.parametrize(
    "named", ['"resp_\\ud800"', '"resp_\\u0000é"', "5", '["resp_x"]', "[" * 5000 + "]" * 5000, '{"a": 1e999}', '""']
)
def test_a_name_that_is_none_is_refused(engine, start, mode, named):
    with start(mode=mode) as gateway:
        path = f"/s/{gateway.open()}{RESPONSES}" if mode == "train" else RESPONSES
        body = b'{"model": "m", "input": "x", "previous_response_id": %b}' % named.encode()
        got = gateway.post(path, body)
        assert got.status in (400, 404), got.body
        assert set(got.json["error"]) == {"message", "type", "param", "code"}
    assert engine.received == []


def test_what_was_not_to_be_kept_or_failed_is_not_found(engine, start):
    with start(mode="train") as gateway:
        key = gateway.open()
        kept_not = respond(gateway, key, input="go", store=False).id
        engine.answers.append(Answer(chunks=[b'{"error": {"message": "dead"}}']))
        with pytest.raises(openai.APIStatusError):
            respond(gateway, key, input="go")
        calls = gateway.recorded(2)
        assert calls[1].state is CallState.FAILED
    with start(mode="train") as gateway:
        for named in (kept_not, f"resp_{calls[0].id}", f"resp_{calls[1].id}"):
            with pytest.raises(openai.NotFoundError):
                respond(gateway, key, input="x", previous_response_id=named)


def test_a_chat_call_is_no_response(engine, gateway):
    key = gateway.open()
    gateway.chat(key)
    with pytest.raises(openai.NotFoundError):
        respond(gateway, key, input="x", previous_response_id=f"resp_{gateway.call().id}")


def test_another_attempts_response_is_not_found_after_a_restart_either(engine, start):
    with start(mode="train") as gateway:
        mine, theirs = gateway.open("attempt-1"), gateway.open("attempt-2")
        secret = respond(gateway, theirs, input="secret words").id
    with start(mode="train") as gateway:
        number = len(engine.received)
        random = secret.removeprefix("resp_")[:24]
        digest = new_call_id("attempt:attempt-1")[24:]
        for named in (secret, f"resp_{random}{digest}", f"resp_{random}"):
            got = gateway.post(f"/s/{mine}{RESPONSES}", {"model": "m", "input": "x", "previous_response_id": named})
            assert got.status == 404
            assert b"secret words" not in got.body
        assert len(engine.received) == number
        respond(gateway, theirs, input="x", previous_response_id=secret)  # and its own attempt finds it


def test_provider_traffic_is_told_apart_by_its_key(engine, start):
    ask = {"model": "m", "input": "secret words"}
    with start(mode="record", redact="off") as gateway:
        got = gateway.post(RESPONSES, ask, {"authorization": "Bearer sk-theirs"})
    with start(mode="record", redact="off") as gateway:
        again = {"model": "m", "input": "x", "previous_response_id": got.json["id"]}
        for headers in ({"authorization": "Bearer sk-mine"}, {}, {"x-api-key": "sk-theirs", "cookie": "a=b"}):
            assert gateway.post(RESPONSES, again, headers).status == 404
        assert gateway.post(RESPONSES, again, {"authorization": "Bearer sk-theirs"}).status == 200
    assert "secret words" in json.dumps(engine.received[-1].json)


def test_a_calls_id_belongs_to_its_owner():
    ids = {new_call_id("a") for _ in range(100)}
    assert len(ids) == 100
    for id in ids:
        assert is_own_call("a", id)
        assert not is_own_call("b", id)
        assert not is_own_call("a", id[:-1])
        assert not is_own_call("a", "0" + id[1:] if id[0] != "0" else "1" + id[1:])


def test_a_conversation_by_names_of_answers_is_one_trajectory(engine, start):
    headers = {"authorization": "Bearer sk-mine"}
    for restarted in (False, True):
        with start(mode="record") as gateway:
            first = gateway.post(RESPONSES, {"model": "m", "input": f"go {restarted}"}, headers).json["id"]
            if not restarted:
                again = {"model": "m", "input": "more", "previous_response_id": first}
                gateway.post(RESPONSES, again, headers)
                gateway.post(RESPONSES, again | {"input": "more or less"}, headers)
        if restarted:
            with start(mode="record") as gateway:
                gateway.post(RESPONSES, {"model": "m", "input": "x", "previous_response_id": first}, headers)
    with start(mode="record") as gateway:
        calls = gateway.store.calls_after(0)
    names = [call.attempt_id for call in calls]
    assert len(calls) == 5
    assert (len(set(names[:3])), len(set(names[3:])), len(set(names))) == (1, 1, 2)


def test_a_trajectory_that_is_not_kept_is_kept_in_no_part(engine, start):
    with start(mode="record", sample_rate=0.0) as gateway:
        first = gateway.post(RESPONSES, {"model": "m", "input": "go"}).json["id"]
        got = gateway.post(RESPONSES, {"model": "m", "input": "more", "previous_response_id": first})
        assert got.status == 200
        assert [message["content"] for message in engine.received[1].json["messages"]] == ["go", "Hello wörld!", "more"]
        assert gateway.store.calls_after(0) == []
        assert gateway.client.stats()["unsampled"] == 2


# -- items by name -----------------------------------------------------------------------------------------------------


def by_name(response):
    return [{"type": "item_reference", "id": item.id} for item in response.output]


@STREAMED
@pytest.mark.parametrize("restarted", [False, True])
def test_items_may_be_named_instead_of_sent_again(engine, tmp_path, streamed, restarted):
    """As clients do that take the server to keep their items: AI SDK's among them."""
    store = tmp_path / "s.sqlite3"
    engine.sampled = [CALLING]
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(RunningGateway(engine, store, mode="train"))
        key = gateway.open()
        said = [{"role": "user", "content": "go"}]
        for output in ("ok", "fine"):
            answer = respond(gateway, key, streamed, input=said, tools=[TOOL])
            said += [*by_name(answer), function_output(answer, output)]
            if restarted:
                gateway = stack.enter_context(RunningGateway(engine, store, mode="train"))
        engine.sampled = [Sampled()]
        respond(gateway, key, streamed, input=said, tools=[TOOL])
        calls = gateway.recorded(3)
    messages = engine.received[-1].json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert messages[:3] == engine.received[-2].json["messages"]
    assert [messages[1]["tool_calls"], messages[3]["tool_calls"]] == [[CALL], [CALL]]
    assert [messages[2]["content"], messages[4]["content"]] == ["ok", "fine"]
    assert len({call.id for call in calls}) == 3


def function_output(response, output):
    return {"type": "function_call_output", "call_id": response.output[0].call_id, "output": output}


def test_an_item_of_another_attempt_is_not_found(engine, start):
    with start(mode="train") as gateway:
        mine, theirs = gateway.open("attempt-1"), gateway.open("attempt-2")
        secret = by_name(respond(gateway, theirs, input="secret words"))
    with start(mode="train") as gateway:
        number = len(engine.received)
        made_up = [{"type": "item_reference", "id": f"msg_{new_call_id('attempt:attempt-1')}00"}]
        for named in (secret, made_up, [{"type": "item_reference", "id": "rs_1"}]):
            with pytest.raises(openai.NotFoundError, match=f"Item with id '{named[0]['id']}' not found") as caught:
                respond(gateway, mine, input=[*named, {"role": "user", "content": "x"}])
            assert (caught.value.param, caught.value.body["type"]) == ("input", "invalid_request_error")
        assert len(engine.received) == number


def test_named_items_belong_to_their_trajectory(engine, start):
    headers = {"authorization": "Bearer sk-mine"}
    with start(mode="record") as gateway:
        first = gateway.post(RESPONSES, {"model": "m", "input": "go"}, headers).json
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        items = [{"role": "user", "content": "go"}, *named, {"role": "user", "content": "more"}]
        assert gateway.post(RESPONSES, {"model": "m", "input": items}, headers).status == 200
        calls = gateway.store.calls_after(0)
    assert len({call.attempt_id for call in calls}) == 1
