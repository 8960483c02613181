"""Chat answers as Anthropic messages, plain and streamed."""

from __future__ import annotations

import json

import pytest

from dialects.chat_streams import USAGE, call_delta, calls, chunk, end, plain, read_event, run
from outrider.dialects.anthropic_reply import PING_EVERY, MessagesStream, from_chat
from outrider.dialects.anthropic_request import INVALID_JSON, MessagesState
from outrider.dialects.translate_reasoning import unseal
from outrider.errors import EngineError


def state(**more):
    return MessagesState(id="msg_1", model="claude", **more)


def stream(*chunks, finish="stop", **more):
    return run(MessagesStream(state(**more), prompt_tokens=9), [*chunks, *end(finish)])


def types(events):
    return [event["type"] for event in events]


def blocks_of(events):
    """Content as a client puts it together; blocks come one after the other and each is closed once."""
    blocks, open_at = [], None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_at is None
            assert event["index"] == len(blocks)
            open_at = event["index"]
            blocks.append(dict(event["content_block"], json=""))
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_at
            delta, block = event["delta"], blocks[-1]
            kind = delta["type"]
            if kind == "text_delta":
                block["text"] += delta["text"]
            elif kind == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif kind == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                assert kind == "input_json_delta"
                block["json"] += delta["partial_json"]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_at
            open_at = None
    assert open_at is None
    for block in blocks:
        found = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(found)
    return blocks


def tool_blocks(events):
    return [(block["id"], block["name"], block["input"]) for block in blocks_of(events)]


# -- A: the grammar ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [frozenset(), frozenset({"Read"})])
def test_A01_all_arguments_in_the_first_delta(eager):
    events = stream(calls(call_delta(0, "c", "Read", '{"file":"a"}')), finish="tool_calls", eager_tools=eager)
    assert types(events) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1]["content_block"] == {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    assert events[2]["delta"] == {"type": "input_json_delta", "partial_json": '{"file":"a"}'}
    assert events[4]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("eager", [frozenset(), frozenset({"Read"})])
@pytest.mark.parametrize("arguments", [None, "", "{}", " "])
def test_A01_a_tool_without_arguments_has_an_empty_object(arguments, eager):
    events = stream(calls(call_delta(0, "c", "Read", arguments)), finish="tool_calls", eager_tools=eager)
    assert tool_blocks(events) == [("c", "Read", {})]


def test_A02_empty_tool_calls_beside_text_are_text():
    events = stream(
        chunk({"role": "assistant", "content": None, "tool_calls": []}),
        chunk({"content": "H", "tool_calls": []}),
        chunk({"content": "i", "tool_calls": []}),
    )
    assert [event["delta"] for event in events if event["type"] == "content_block_delta"] == [
        {"type": "text_delta", "text": "H"},
        {"type": "text_delta", "text": "i"},
    ]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


def test_A04_message_start_is_complete_and_tells_the_number_of_input_tokens():
    events = stream(chunk({"reasoning_content": "hm"}))
    assert events[0]["message"] == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 9,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    assert events[-2]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_A04_without_a_count_nothing_is_sent_before_one_is_known():
    translator = MessagesStream(state())
    assert translator.feed(chunk({"reasoning_content": "hm"})) == []
    assert translator.feed(chunk({"content": "Hi"})) == []
    events = [read_event(raw) for raw in translator.feed(chunk({"content": "!"}, usage={"prompt_tokens": 7}))]
    assert types(events)[:2] == ["message_start", "content_block_start"]
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    events += [read_event(raw) for one in end() for raw in translator.feed(one)]
    events += [read_event(raw) for raw in translator.finish()]
    assert [block.get("text") or block["thinking"] for block in blocks_of(events)] == ["hm", "Hi!"]


@pytest.mark.parametrize("where", ["chunk", "choice"])
def test_A04_prompt_ids_on_the_first_chunk_are_a_count(where):
    first = chunk({"role": "assistant", "content": ""})
    (first if where == "chunk" else first["choices"][0])["prompt_token_ids"] = [5, 6, 7]
    (event,) = MessagesStream(state()).feed(first)
    assert read_event(event)["message"]["usage"]["input_tokens"] == 3


def test_an_empty_answer_is_an_empty_message():
    events = stream(chunk({"role": "assistant", "content": ""}))
    assert types(events) == ["message_start", "message_delta", "message_stop"]
    assert from_chat(plain({"content": ""}), state())["content"] == []


# -- S: what chat streams do -------------------------------------------------------------------------------------------


def test_S03_chunks_without_choices_are_harmless():
    events = stream({"id": "", "model": "", "choices": []}, {"usage": {"prompt_tokens": 9}}, chunk({"content": "x"}))
    assert blocks_of(events) == [{"type": "text", "text": "x"}]


def test_S05_a_new_id_on_a_used_index_is_a_new_call():
    one, two = call_delta(0, "a", "read", '{"p":1}'), call_delta(0, "b", "read", '{"p":2}')
    expected = [("a", "read", {"p": 1}), ("b", "read", {"p": 2})]
    assert tool_blocks(stream(calls(one), calls(two), finish="tool_calls")) == expected
    assert tool_blocks(stream(calls(one, two), finish="tool_calls")) == expected


@pytest.mark.parametrize("name", ["grep", ""])
def test_S06_repeated_ids_and_names_are_not_joined(name):
    deltas = [call_delta(0, "c1", "grep", "")] + [call_delta(0, "c1", name, piece) for piece in ("{", "}")]
    assert tool_blocks(stream(*map(calls, deltas), finish="tool_calls")) == [("c1", "grep", {})]


def test_S06_arguments_on_another_index_belong_to_the_call_with_their_id():
    events = stream(calls(call_delta(2, "c1", "grep", "")), calls(call_delta(1, "c1", args='{"a": 1}')))
    assert tool_blocks(events) == [("c1", "grep", {"a": 1})]


def test_S06_arguments_of_no_known_call_are_an_error_not_a_call_without_an_id():
    events = stream(calls(call_delta(2, "c1", "grep", "")), calls(call_delta(1, args='{"a": 1}')))
    assert events[-1]["type"] == "error"
    assert "never began" in events[-1]["error"]["message"]
    assert "message_stop" not in types(events)


def test_S06_a_call_without_a_name_is_an_error():
    events = stream(calls(call_delta(0, "c1", args="{}")))
    assert "without a name" in events[-1]["error"]["message"]
    with pytest.raises(EngineError, match="without a name"):
        from_chat(plain({"tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}), state())


def test_S06_a_call_without_an_id_gets_one_of_its_own():
    first, second = call_delta(0, name="read", args="{}"), call_delta(1, name="read", args="{}")
    ids = [id for id, _, _ in tool_blocks(stream(calls(first), calls(second)))]
    assert all(ids)
    assert len(set(ids)) == 2


def test_S06_two_calls_with_one_id_can_be_told_apart():
    deltas = call_delta(0, "x", "read", '{"p":1}'), call_delta(1, "x", "read", '{"p":2}')
    found = tool_blocks(stream(*map(calls, deltas)))
    assert [input for _, _, input in found] == [{"p": 1}, {"p": 2}]
    assert found[0][0] != found[1][0]


def test_interleaved_calls_come_out_one_after_the_other():
    events = stream(
        calls(call_delta(0, "a", "read", '{"p"')),
        calls(call_delta(1, "b", "read", "")),
        calls(call_delta(1, args='{"p":')),
        calls(call_delta(0, args=":1}")),
        calls(call_delta(1, args="2}")),
        finish="tool_calls",
        eager_tools=frozenset({"read"}),
    )
    assert tool_blocks(events) == [("a", "read", {"p": 1}), ("b", "read", {"p": 2})]


def test_S07_only_the_first_choice_is_read():
    other = chunk({"content": "no"})
    other["choices"].insert(0, {"index": 1, "delta": {"content": "BBB"}, "finish_reason": "length"})
    assert blocks_of(stream(chunk({"content": "A"}), other)) == [{"type": "text", "text": "Ano"}]


def test_S09_an_error_inside_the_stream_is_an_error_event_and_the_end():
    translator = MessagesStream(state(), prompt_tokens=1)
    events = run(translator, [chunk({"content": "x"}), {"error": {"message": "engine dead", "code": 500}}, *end()])
    assert types(events) == ["message_start", "content_block_start", "content_block_delta", "error"]
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "engine dead"}}
    assert translator.failure == "engine dead"
    assert translator.fail("again") == []


def test_S09_a_stream_without_a_finish_reason_is_no_answer():
    events = run(MessagesStream(state(), prompt_tokens=1), [chunk({"content": "x"})])
    assert events[-1]["type"] == "error"


def test_a_failure_after_the_end_takes_the_place_of_the_end():
    translator = MessagesStream(state(), prompt_tokens=1)
    run(translator, [chunk({"content": "x"}), *end()])
    (event,) = translator.fail("The call could not be recorded.", status=503)
    assert read_event(event)["error"] == {"type": "api_error", "message": "The call could not be recorded."}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_S13_reasoning_under_each_of_its_names_is_a_thinking_block(name):
    message = {name: "hm", "content": "Hi"}
    events = stream(chunk({name: "h"}), chunk({name: "m"}), chunk({"content": "Hi"}))
    for content in (blocks_of(events), from_chat(plain(message), state())["content"]):
        assert [block["type"] for block in content] == ["thinking", "text"]
        assert content[0]["thinking"] == "hm"
        assert unseal(content[0]["signature"]) == "hm"


def test_S13_the_same_reasoning_under_two_names_is_there_once():
    events = stream(chunk({"reasoning_content": "hm", "reasoning": "hm"}))
    assert blocks_of(events)[0]["thinking"] == "hm"


def test_thinking_can_be_switched_off_or_left_to_the_signature():
    message = {"reasoning": "hm", "content": "Hi"}
    chunks = chunk({"reasoning": "hm"}), chunk({"content": "Hi"})
    for content in (
        blocks_of(stream(*chunks, thinking=False)),
        from_chat(plain(message), state(thinking=False))["content"],
    ):
        assert content == [{"type": "text", "text": "Hi"}]
    silent = state(thinking_text=False)
    for content in (blocks_of(stream(*chunks, thinking_text=False)), from_chat(plain(message), silent)["content"]):
        assert content[0]["thinking"] == ""
        assert unseal(content[0]["signature"]) == "hm"


# -- tool input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["{bad", "[1]", "3", '{"a": 1}}'])
def test_input_that_is_no_object_reaches_the_agent_as_one(written):
    call = {"id": "c", "function": {"name": "Read", "arguments": written}}
    whole = from_chat(plain({"tool_calls": [call]}, "tool_calls"), state())
    assert whole["content"][0]["input"] == {INVALID_JSON: written}
    assert tool_blocks(stream(calls(call_delta(0, "c", "Read", written)))) == [("c", "Read", {INVALID_JSON: written})]


def test_arguments_that_are_an_object_already_are_taken():
    call = {"id": "c", "function": {"name": "Read", "arguments": {"a": 1}}}
    assert from_chat(plain({"tool_calls": [call]}), state())["content"][0]["input"] == {"a": 1}


def test_input_comes_piece_by_piece_only_where_the_client_asks_for_it():
    pieces = ['{"a', '": ', "1}"]
    chunks = [calls(call_delta(0, "c", "Read", ""))] + [calls(call_delta(0, args=piece)) for piece in pieces]

    def deltas(**more):
        found = [event for event in stream(*chunks, **more) if event["type"] == "content_block_delta"]
        return [event["delta"]["partial_json"] for event in found]

    assert deltas(eager_tools=frozenset({"Read"})) == pieces
    assert deltas() == ["".join(pieces)]


def test_a_long_input_is_accompanied_by_pings():
    text = json.dumps({"text": "x" * (3 * PING_EVERY)})
    chunks = [calls(call_delta(0, "c", "Write", "")), *(calls(call_delta(0, args=char)) for char in text)]
    events = stream(*chunks)
    assert types(events).count("ping") == len(text) // PING_EVERY
    assert tool_blocks(events) == [("c", "Write", json.loads(text))]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finish", "with_call", "reason"),
    [
        ("stop", False, "end_turn"),
        ("stop", True, "tool_use"),
        ("tool_calls", True, "tool_use"),
        ("tool_calls", False, "end_turn"),
        ("length", False, "max_tokens"),
        ("length", True, "max_tokens"),
        ("content_filter", False, "refusal"),
        ("something_new", False, "end_turn"),
    ],
)
def test_stop_reasons(finish, with_call, reason):
    message = {"content": "x"}
    chunks = [chunk({"content": "x"})]
    if with_call:
        message["tool_calls"] = [{"id": "c", "function": {"name": "Read", "arguments": "{}"}}]
        chunks.append(calls(call_delta(0, "c", "Read", "{}")))
    assert from_chat(plain(message, finish), state())["stop_reason"] == reason
    assert stream(*chunks, finish=finish)[-2]["delta"]["stop_reason"] == reason


def test_a_stop_sequence_is_named():
    expected = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    whole = from_chat(plain({"content": "x"}, "stop", stop_reason="END"), state())
    assert {name: whole[name] for name in expected} == expected
    last = chunk({}, "stop")
    last["choices"][0]["stop_reason"] = "END"
    events = run(MessagesStream(state(), prompt_tokens=1), [chunk({"content": "x"}), last])
    assert events[-2]["delta"] == expected
    by_token = from_chat(plain({"content": "x"}, "stop", stop_reason=151645), state())
    assert by_token["stop_reason"] == "end_turn"


def test_a_cut_tool_input_at_the_token_limit():
    events = stream(calls(call_delta(0, "c", "Read", '{"fi')), finish="length")
    assert tool_blocks(events) == [("c", "Read", {INVALID_JSON: '{"fi'})]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_refusal_is_text_and_a_stop_reason():
    whole = from_chat(plain({"content": None, "refusal": "No."}), state())
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": "No."}], "refusal")


def test_a_plain_answer():
    assert from_chat(plain({"content": "Hi"}), state()) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": USAGE["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": 2},
        },
    }


@pytest.mark.parametrize(
    "reply", [{"error": {"message": "dead"}}, {"choices": []}, plain({"content": "x"}, None), {"choices": "no"}]
)
def test_what_is_no_answer_raises(reply):
    with pytest.raises(EngineError):
        from_chat(reply, state())
