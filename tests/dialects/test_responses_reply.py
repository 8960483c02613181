"""Chat answers as responses, plain and streamed."""

from __future__ import annotations

import json

import pytest

from dialects.chat_streams import call_delta, calls, chunk, end, plain, read_event, run
from outrider.dialects.openai_responses import OpenAIResponses
from outrider.dialects.openai_responses_native import ResponsesReader
from outrider.dialects.openai_responses_reply import ResponsesStream, conversation, from_chat, upstream_error
from outrider.dialects.openai_responses_request import to_chat
from outrider.dialects.translate_errors import read_error
from outrider.dialects.translate_reasoning import unseal
from outrider.errors import EngineError
from outrider.wire import Event

TOOLS = [
    {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "team",
        "tools": [{"type": "function", "name": "ask"}, {"type": "custom", "name": "js"}],
    },
]


def state(**more):
    return to_chat({"model": "m", "input": "go", "tools": TOOLS, **more}).state


def stream(*chunks, finish="stop", **more):
    return run(ResponsesStream(state(**more)), [*chunks, *end(finish)])


def types(events):
    return [event["type"].removeprefix("response.") for event in events]


def checked(events):
    """`events`, once they keep to the grammar: numbered by one, each item opened and closed once, in order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events)[:2] == ["created", "in_progress"]
    assert events[-1]["response"]["id"] == events[0]["response"]["id"]
    open_item, done = None, []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            assert event["output_index"] == len(done)
            open_item = event["item"]["id"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_item
            open_item = None
            done.append(event["item"])
        else:
            assert event["item_id"] == open_item
            assert event["output_index"] == len(done)
    assert open_item is None
    assert events[-1]["response"]["output"] == done
    return events


def output_of(events):
    return checked(events)[-1]["response"]["output"]


# -- C01: the grammar --------------------------------------------------------------------------------------------------


def test_C01_text():
    events = checked(stream(chunk({"content": "O"}), chunk({"content": "K"})))
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    part = {"type": "output_text", "text": "OK", "annotations": [], "logprobs": []}
    assert events[2]["item"]["content"] == []
    assert events[3]["part"] == {**part, "text": ""}
    assert events[6]["text"] == "OK"
    assert events[7]["part"] == part
    assert events[-1]["response"]["output"] == [
        {
            "id": events[2]["item"]["id"],
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
    ]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 14,
    }


def test_C01_completed_is_sent_for_an_empty_answer():
    events = checked(stream(chunk({"role": "assistant", "content": ""})))
    assert types(events) == ["created", "in_progress", "completed"]


def test_C01_a_function_call():
    events = checked(stream(calls(call_delta(0, "c1", "read", '{"a":')), calls(call_delta(0, args="1}"))))
    assert types(events)[2:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert item["id"] != item["call_id"] == "c1"
    assert (item["type"], item["name"], item["arguments"], item["status"]) == (
        "function_call",
        "read",
        '{"a":1}',
        "completed",
    )
    assert events[2]["item"] == {**item, "arguments": "", "status": "in_progress"}
    assert (events[5]["name"], events[5]["arguments"]) == ("read", '{"a":1}')


@pytest.mark.parametrize("arguments", [None, "", " "])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    events = stream(calls(call_delta(0, "c1", "read", arguments)))
    (item,) = output_of(events)
    assert item["arguments"] == "{}"
    deltas = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert json.loads("".join(deltas)) == {}


def test_C01_failure_is_response_failed():
    translator = ResponsesStream(state())
    events = run(translator, [chunk({"content": "x"}), {"error": {"message": "engine dead", "code": 500}}, *end()])
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "failed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(6))
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "engine dead"}
    assert translator.failure == "engine dead"
    assert translator.fail("again") == []


def test_C01_failure_before_the_first_chunk_is_a_whole_stream_too():
    translator = ResponsesStream(state())
    events = [read_event(raw) for raw in translator.fail("too long", code="context_length_exceeded")]
    assert types(events) == ["created", "in_progress", "failed"]
    assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"


def test_C01_a_stream_without_a_finish_reason_has_failed():
    assert types(run(ResponsesStream(state()), [chunk({"content": "x"})]))[-1] == "failed"


def test_a_failure_after_the_end_takes_the_place_of_the_end():
    translator = ResponsesStream(state())
    sent = [event for one in [chunk({"content": "x"}), *end()] for event in translator.feed(one)]
    translator.finish()
    events = [read_event(raw) for raw in [*sent, *translator.fail("not recorded", status=503)]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types(events)[-1] == "failed"
    assert events[-1]["response"]["output"] == []


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(finish, reason):
    for response in (
        checked(stream(chunk({"content": "x"}), finish=finish))[-1]["response"],
        from_chat(plain({"content": "x"}, finish), state()),
    ):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": reason}
        assert response["output"][0]["status"] == "incomplete"
    assert stream(chunk({"content": "x"}), finish=finish)[-1]["type"] == "response.incomplete"


def test_a_refusal_is_a_part_of_its_own():
    events = checked(stream(chunk({"refusal": "N"}), chunk({"refusal": "o."})))
    assert types(events)[3:8] == [
        "content_part.added",
        "refusal.delta",
        "refusal.delta",
        "refusal.done",
        "content_part.done",
    ]
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]


# -- C03: custom tools -------------------------------------------------------------------------------------------------


def test_C03_a_custom_call_has_its_input_raw():
    patch = '*** Begin Patch\n+ "é"\n'
    arguments = json.dumps({"input": patch})
    events = checked(
        stream(calls(call_delta(0, "c1", "patch", arguments[:9])), calls(call_delta(0, args=arguments[9:])))
    )
    assert types(events)[2:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert events[3]["delta"] == events[4]["input"] == patch
    (item,) = events[-1]["response"]["output"]
    assert {name: item[name] for name in ("type", "call_id", "name", "input")} == {
        "type": "custom_tool_call",
        "call_id": "c1",
        "name": "patch",
        "input": patch,
    }
    assert "namespace" not in item
    assert events[2]["item"]["input"] == ""


def test_calls_of_a_namespace_name_it():
    chunks = calls(call_delta(0, "c1", "team__ask", "{}")), calls(call_delta(1, "c2", "team__js", '{"input": "x"}'))
    ask, js = output_of(stream(*chunks))
    assert (ask["type"], ask["name"], ask["namespace"]) == ("function_call", "ask", "team")
    assert (js["type"], js["name"], js["namespace"], js["input"]) == ("custom_tool_call", "js", "team", "x")


def test_S05_a_new_id_on_a_used_index_is_a_new_call():
    deltas = call_delta(0, "a", "read", '{"p":1}'), call_delta(0, "b", "read", '{"p":2}')
    items = output_of(stream(*map(calls, deltas)))
    assert [(item["call_id"], item["arguments"]) for item in items] == [("a", '{"p":1}'), ("b", '{"p":2}')]


def test_S06_repeated_ids_and_names_are_not_joined():
    deltas = [call_delta(0, "c1", "read", piece) for piece in ("", "{", "}")]
    (item,) = output_of(stream(*map(calls, deltas)))
    assert (item["name"], item["arguments"]) == ("read", "{}")


# -- reasoning ---------------------------------------------------------------------------------------------------------


def test_S13_reasoning_is_an_item_of_its_own():
    events = checked(stream(chunk({"reasoning": "h"}), chunk({"reasoning_content": "m"}), chunk({"content": "Hi"})))
    assert types(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    reasoning, _ = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning


def test_reasoning_is_a_summary_where_the_client_asks_for_one():
    events = checked(stream(chunk({"reasoning": "h"}), chunk({"reasoning": "m"}), reasoning={"summary": "auto"}))
    assert types(events)[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert events[3]["part"] == {"type": "summary_text", "text": ""}
    (item,) = events[-1]["response"]["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item


def test_C06_reasoning_is_sealed_where_the_client_keeps_it_and_comes_back():
    message = {
        "reasoning": "hm",
        "content": "",
        "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{}"}}],
    }
    asked = {"include": ["reasoning.encrypted_content"], "store": False}
    first = state(**asked)
    response = from_chat(plain(message, "tool_calls"), first)
    assert unseal(response["output"][0]["encrypted_content"]) == "hm"
    stripped = [{name: value for name, value in item.items() if name != "content"} for item in response["output"]]
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    again = to_chat({"model": "m", "input": [{"role": "user", "content": "go"}, *stripped, output], **asked})
    assert again.request["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
    }


# -- a response --------------------------------------------------------------------------------------------------------


def test_the_response_repeats_the_request():
    given = {"instructions": "I", "temperature": 0.2, "metadata": {"a": "b"}, "max_output_tokens": 5, "store": False}
    response = from_chat(plain({"content": "x"}), state(**given))
    assert {name: response[name] for name in given} == given
    assert response["tools"] == TOOLS
    assert response["created_at"] == 17
    assert from_chat(plain({"content": "x"}), state())["top_p"] == 1.0


def test_conversation_is_what_a_later_request_means_by_the_response():
    first = state()
    response = from_chat(plain({"content": "x"}), first)
    assert conversation(first, response) == [{"role": "user", "content": "go"}, *response["output"]]


def test_logprobs_only_where_they_were_asked_for():
    entry = {
        "token": "x",
        "bytes": [120],
        "logprob": -0.5,
        "top_logprobs": [{"token": "y", "bytes": [121], "logprob": -1.0}],
    }
    choice = {"logprobs": {"content": [entry]}}
    one = chunk({"content": "x"})
    one["choices"][0] |= choice
    asked = state(include=["message.output_text.logprobs"])
    assert from_chat(plain({"content": "x"}, **choice), asked)["output"][0]["content"][0]["logprobs"] == [entry]
    events = run(ResponsesStream(asked), [one, *end()])
    assert [event["logprobs"] for event in events if "logprobs" in event] == [[entry], [entry]]
    assert from_chat(plain({"content": "x"}, **choice), state())["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("reply", [{"error": {"message": "dead"}}, {"choices": []}, plain({"content": "x"}, None)])
def test_what_is_no_answer_raises(reply):
    with pytest.raises(EngineError):
        from_chat(reply, state())


# -- errors ------------------------------------------------------------------------------------------------------------


def test_R11_a_prompt_that_does_not_fit_has_the_code_and_the_wording_that_agents_match():
    message = "The input (6347 tokens) is longer than the model's context length (4608 tokens)."
    body = json.dumps({"object": "error", "message": message, "code": 400}).encode()
    assert upstream_error(read_error(400, body)) == {
        "error": {
            "message": "This model's maximum context length is 4608 tokens. However, your messages resulted in 6347 "
            "tokens. Please reduce the length of the messages or completion.",
            "type": "invalid_request_error",
            "param": None,
            "code": "context_length_exceeded",
        }
    }
    familiar = "This model's maximum context length is 4608 tokens. However, you requested 6859 tokens."
    body = json.dumps({"error": {"message": familiar}}).encode()
    assert upstream_error(read_error(400, body))["error"]["message"] == familiar


def test_errors_have_the_protocols_shape():
    dialect = OpenAIResponses()
    assert json.loads(dialect.error(404, "why", code="not_found", param="input.0")) == {
        "error": {"message": "why", "type": "invalid_request_error", "param": "input.0", "code": "not_found"}
    }
    assert json.loads(dialect.error(429, "why"))["error"]["type"] == "rate_limit_error"
    reader = ResponsesReader()
    for _ in range(2):
        reader.event(Event(b"data: {}\n\n", b"{}", b"response.output_text.delta"))
    event = read_event(reader.fail(503, "why", code="store_busy"))
    assert event == {"type": "error", "sequence_number": 2, "code": "store_busy", "message": "why", "param": None}
