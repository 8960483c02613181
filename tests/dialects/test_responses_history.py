"""What Responses requests refer to: items of earlier answers, and answers by their id."""

from __future__ import annotations

import pytest

from dialects.responses_items import body, call, chat_call, messages_of, output, user
from outrider.dialects.openai_responses_history import RecentResponses
from outrider.dialects.openai_responses_request import to_chat
from outrider.dialects.translate_reasoning import seal
from outrider.errors import RequestError


def test_C06_call_ids_and_item_ids_are_kept_apart_and_reasoning_comes_back():
    messages = messages_of(
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("hm")},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        store=False,
        include=["reasoning.encrypted_content"],
    )
    assert messages == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [chat_call("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]


@pytest.mark.parametrize(
    ("item", "reasoning", "notes"),
    [
        ({"encrypted_content": "gAAAA", "summary": []}, None, ("reasoning: another server's encrypted_content",)),
        ({"encrypted_content": None, "summary": [{"type": "summary_text", "text": "s"}]}, "s", ()),
        ({"content": [{"type": "reasoning_text", "text": "r"}], "summary": []}, "r", ()),
        ({"summary": []}, None, ()),
    ],
)
def test_C06_reasoning_that_is_not_sealed_by_us(item, reasoning, notes):
    translation = to_chat(body(user("go"), {"type": "reasoning", "id": "rs_1", **item}, call()))
    assert translation.request["messages"][1].get("reasoning_content") == reasoning
    assert translation.notes == notes


def test_C06_an_unknown_previous_response_is_not_found():
    for history in (None, RecentResponses().of("me")):
        with pytest.raises(RequestError) as caught:
            to_chat(body(previous_response_id="resp_gone"), history=history)
        assert (caught.value.status, caught.value.code) == (404, "previous_response_not_found")
        assert caught.value.param == "previous_response_id"
        assert str(caught.value) == "Previous response with id 'resp_gone' not found."


def test_a_previous_response_goes_before_the_input_and_its_instructions_do_not_count():
    all = RecentResponses()
    all.of("me").keep("resp_1", [user("run"), call()])
    translation = to_chat(body(output(), previous_response_id="resp_1", instructions="new"), history=all.of("me"))
    assert translation.request["messages"] == [
        {"role": "system", "content": "new"},
        user("run"),
        {"role": "assistant", "content": "", "tool_calls": [chat_call()]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]
    assert list(translation.state.items) == [user("run"), call(), output()]


def test_another_owner_can_not_read_a_response():
    all = RecentResponses()
    all.of("me").keep("resp_1", [user("secret")])
    assert all.of("you").items("resp_1") is None


def test_the_memory_of_responses_is_bounded_and_forgets_the_oldest():
    all = RecentResponses(max_bytes=600)  # of some 60 for each
    mine = all.of("me")
    for index in range(20):
        mine.keep(f"resp_{index}", [user("x" * 30)])
        mine.items("resp_0")  # what is used stays
    kept = [index for index in range(20) if mine.items(f"resp_{index}") is not None]
    assert 5 < len(kept) < 12
    assert kept == [0, *range(21 - len(kept), 20)]
    mine.keep("resp_19", [user("y" * 30)])
    assert mine.items("resp_19") == [user("y" * 30)]
    mine.keep("resp_20", [user("z" * 200)])  # it would push out too many others
    assert mine.items("resp_20") is None
    assert mine.items("resp_19") is not None


def test_a_long_conversation_takes_its_own_length():
    mine = RecentResponses(max_bytes=10_000).of("me")
    previous = ""
    for index in range(8):
        mine.keep(f"resp_{index}", [user(str(index) * 1000)], previous)
        previous = f"resp_{index}"
    for index in range(8):
        assert mine.items(f"resp_{index}") == [user(str(n) * 1000) for n in range(index + 1)]
    for index in range(8, 12):
        mine.keep(f"resp_{index}", [user(str(index) * 1000)], f"resp_{index - 1}")
    assert mine.items("resp_11") is None  # its beginning is gone, and so is all of it
