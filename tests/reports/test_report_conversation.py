from __future__ import annotations

import json
import random
import re

import pytest
from fabricate import call
from hypothesis import given
from hypothesis import strategies as st

from outrider.reports.conversation import Message, reply_messages, request_messages, turns


def said(role, text):
    return Message(role=role, text=text)


def stream(*events):
    return "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events).encode()


def test_later_calls_show_only_what_is_new():
    rng = random.Random(0)
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    # The harness strips the reply before it sends it back, as many do.
    second = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    other = [{"role": "user", "content": "something else"}]
    calls = [call("x", 0, first, " a\n", rng), call("x", 1, second, "b", rng), call("x", 2, other, "c", rng)]
    one, two, three = turns(calls)
    assert (one.continues, one.new) == (None, (said("system", "s"), said("user", "u")))
    assert (two.continues, two.repeated, two.new) == (0, 3, (said("user", "more"),))
    assert two.replies == (said("assistant", "b"),)
    assert (three.continues, three.new) == (None, (said("user", "something else"),))


def test_a_retry_of_the_same_request_continues_it():
    messages = [{"role": "user", "content": "u"}]
    calls = [call("x", i, messages, f"reply {i}", random.Random(0)) for i in range(2)]
    assert turns(calls)[1].new == ()
    assert turns(calls)[1].continues == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, [said("user", "hi")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}]},
            [said("user", "see\n[image_url]")],
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}]},
            [said("assistant", "→ add({})")],
        ),
        ({"prompt": "once"}, [said("prompt", "once")]),
        ({"prompt": [1, 2, 3]}, [said("prompt", "[3 token ids]")]),
        (
            {"system": "be brief", "messages": [{"role": "user", "content": "hi"}]},
            [said("system", "be brief"), said("user", "hi")],
        ),
        ({"instructions": "i", "input": "hi"}, [said("system", "i"), said("user", "hi")]),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "42"}]}]},
            [said("user", "42")],
        ),
        ({"other": 1}, [said("request", '{"other": 1}')]),
    ],
)
def test_requests_of_the_common_protocols(body, expected):
    assert request_messages(json.dumps(body).encode()) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"choices": [{"message": {"role": "assistant", "content": "a"}}, {"message": {"content": "b"}}]},
            ["a", "b"],
        ),
        ({"choices": [{"text": "plain"}]}, ["plain"]),
        ({"content": [{"type": "text", "text": "x"}, {"type": "tool_use", "name": "f", "input": {"a": 1}}]}, None),
        ({"output": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, ["→ f({})"]),
        ({"error": {"message": "overloaded"}}, ["overloaded"]),
        ({"choices": 3, "odd": True}, ['{"choices": 3, "odd": true}']),
    ],
)
def test_replies_of_the_common_protocols(body, expected):
    texts = [message.text for message in reply_messages(json.dumps(body).encode())]
    assert texts == (expected or ['x\n→ f({"a": 1})'])


def test_a_streamed_reply_equals_the_plain_one():
    call_delta = {"index": 0, "function": {"name": "add", "arguments": '{"a"'}}
    body = stream(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Let me "}}]},
        {"choices": [{"index": 1, "delta": {"content": "other"}}]},
        {"choices": [{"index": 0, "delta": {"content": "see"}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [call_delta]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}}]},
        {"choices": []},
        "[DONE]",
    )
    message = {"content": "Let me see", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    plain = reply_messages(json.dumps({"choices": [{"message": message}]}).encode())
    assert reply_messages(body) == (*plain, said("assistant", "other"))


def test_streamed_completions_and_content_blocks_and_an_error_in_the_stream():
    assert reply_messages(stream({"choices": [{"text": "on"}]}, {"choices": [{"text": "ce"}]}))[0].text == "once"
    blocks = stream(
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f"}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"a": 1}'}},
    )
    assert reply_messages(blocks) == (said("assistant", 'hm\n→ f({"a": 1})'),)
    cut = stream({"choices": [{"delta": {"content": "half"}}]}, {"error": {"message": "gone"}})
    assert [(m.role, m.text) for m in reply_messages(cut)] == [("assistant", "half"), ("error", "gone")]


KEYS = """messages role content choices delta message tool_calls function name arguments text input prompt output error
type index content_block response system reasoning"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(re.findall("[a-z_]+", KEYS)), inner, max_size=4)
    ),
    max_leaves=25,
)


@given(JSON)
def test_no_body_is_too_odd(tree):
    body = json.dumps(tree).encode()
    for message in (*request_messages(body), *reply_messages(body), *reply_messages(b"data: " + body + b"\n\n")):
        assert isinstance(message.text, str)
        assert isinstance(message.role, str)


@given(st.binary(max_size=60))
def test_no_bytes_are_too_odd(body):
    request_messages(body)
    reply_messages(body)
