"""Calls without a key: which trajectory they belong to, and which trajectories are kept."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.engine import Sampled
from fakes.gateway import CHAT, RunningGateway
from outrider.gateway import grouping
from outrider.gateway.grouping import LONG, REMEMBERED, Chains, is_kept
from outrider.gateway.sessions import TRAJECTORY_PREFIX

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def fields(body):
    return FIELDS(json.dumps(body).encode())


def chat(*messages):
    return fields({"model": "m", "messages": list(messages)})


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(id, name="f", arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_call_that_goes_on_belongs_to_the_same_trajectory():
    chains = Chains()
    first = chains.trajectory("me", chat(user("a")))
    second = chains.trajectory("me", chat(user("a"), said("b"), user("c")))
    third = chains.trajectory("me", chat(user("a"), said("b"), user("c"), said("d"), user("e")))
    assert first == second == third
    assert chains.trajectory("me", chat(user("x"))) != first
    assert chains.trajectory("you", chat(user("a"), said("b"), user("c"))) != first


def test_A10_what_only_looks_different_is_the_same():
    chains = Chains()
    arguments = '{"city": "Paris", "n": 1}'
    first = chains.trajectory("me", chat({"role": "system", "content": "S"}, user("hi")))
    again = chains.trajectory(
        "me",
        chat(
            {"content": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}], "role": "system"},
            user([{"type": "text", "text": "hi"}]),
            said("", tool_calls=[call("c", arguments=arguments)]),
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ),
    )
    turn = said(None, tool_calls=[call("c", arguments='{"n":1,"city":"Paris"}')], reasoning_content="hm")
    third = chains.trajectory(
        "me",
        chat(
            {"role": "system", "content": "S"},
            user("hi"),
            turn,
            {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c"},
            said("y"),
            user("z"),
        ),
    )
    assert first == again == third


def test_a_long_text_is_the_same_however_it_is_written_and_is_told_from_others():
    text = "long \N{SNOWMAN} " * (LONG // 4)
    chains = Chains()
    first = chains.trajectory("me", chat(user(text)))
    assert chains.trajectory("me", chat(user([{"type": "text", "text": text}]), said("b"), user("c"))) == first
    assert chains.trajectory("me", chat(user(text[:-1] + "x"), said("b"), user("c"))) != first


WORDS = 'A "line"\\ of text,\n\tna\u00efve \u4e2d\u6587 \U0001f600 and 1.5e3. '
TALKS = {
    "messages": [
        user(WORDS * 70_000),  # several pieces
        user(WORDS * 15),  # longer in JSON than `LONG`, and shorter as it is
        said("\U0001f600" * 400_000),
        user([{"type": "text", "text": WORDS * 99}, {"type": "image", "source": {"data": "a" * 5000}}]),
        user([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": WORDS * 99}]}]),
        user([{"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": WORDS * 99}]),
        user([{"type": "search_result", "content": [{"type": "text", "text": WORDS * 99}], "title": WORDS * 99}]),
        user([{"type": "image_url", "image_url": {"url": "a" * 5000}}]),
        user({"text": WORDS * 99}),
        {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"text": WORDS * 99}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": WORDS * 99}}]},
    ],
    "input": [
        {"type": "function_call_output", "call_id": "c", "output": WORDS * 99},
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": WORDS * 99},
        {"role": "user", "content": [{"type": "input_text", "text": WORDS * 99}]},
        WORDS * 99,
    ],
    "prompt": [[1, 2, 3] * 2000],
}


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("name", TALKS)
def test_a_message_means_the_same_in_a_large_request_and_in_a_small_one(name, ascii, monkeypatch):
    fields = {name: msgspec.Raw(json.dumps(TALKS[name], ensure_ascii=ascii).encode())}
    monkeypatch.setattr(grouping, "LARGE", 1 << 40)
    small = grouping._turns(fields)
    monkeypatch.setattr(grouping, "LARGE", 0)
    assert grouping._turns(fields) == small
    assert max(len(meaning) for _, meaning in small) < 30_000


def test_a_large_request_is_named_without_a_copy_of_it():
    body = chat(
        user("word " * 1_000_000 + "\U0001f600"), user([{"type": "image", "source": {"data": "a" * 5_000_000}}])
    )
    chains = Chains()
    tracemalloc.start()
    try:
        chains.trajectory("me", body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000


@pytest.mark.parametrize("other", ["hi ", "Hi", "hi\n"])
def test_a_real_difference_is_another_trajectory(other):
    chains = Chains()
    first = chains.trajectory("me", chat(user("hi")))
    assert chains.trajectory("me", chat(user(other), said("b"), user("c"))) != first


def test_the_same_opening_twice_is_two_trajectories():
    chains = Chains()
    first, second = (chains.trajectory("me", chat(user("hi"))) for _ in range(2))
    assert first != second
    follow_up = chains.trajectory("me", chat(user("hi"), said("b"), user("c")))
    assert follow_up in (first, second)


def test_examples_in_the_prompt_make_no_common_trajectory():
    shots = [user("2+2"), said("4"), user("3+3"), said("6")]
    chains = Chains()
    names = {chains.trajectory("me", chat(*shots, user(f"{n}+{n}"))) for n in range(20)}
    assert len(names) == 20
    follow_up = chains.trajectory("me", chat(*shots, user("7+7"), said("14"), user("sure?")))
    assert follow_up in names


def test_two_gateways_name_one_conversation_alike():
    turns = [user("a"), said("b"), user("c"), said("d"), user("e")]
    names = {Chains().trajectory("me", chat(*turns[:end])) for end in (1, 3, 5)}
    assert len(names) == 1


def test_memory_is_bounded():
    chains = Chains()
    for n in range(REMEMBERED + 10):
        chains.trajectory("me", chat(user(str(n))))
    assert len(chains._asked) == len(chains._names) == REMEMBERED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            {"system": "S", "messages": [user("go")]},
            {
                "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}],
                "messages": [
                    user([{"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}]),
                    said([{"type": "thinking", "thinking": "hm"}, {"type": "tool_use", "name": "f", "input": {}}]),
                    user([{"type": "tool_result", "tool_use_id": "t", "content": "x"}]),
                ],
            },
        ),
        (
            {"instructions": "I", "input": "go"},
            {
                "instructions": "I",
                "input": [
                    user("go"),
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ],
            },
        ),
        ({"prompt": "once"}, {"prompt": ["once", "more"]}),
    ],
    ids=["messages", "responses", "completions"],
)
def test_every_dialect_has_its_chain(first, second):
    chains = Chains()
    assert chains.trajectory("me", fields(first)) == chains.trajectory("me", fields(second))


RECORDINGS = sorted((Path(__file__).parents[1] / "dialects" / "data").glob("*.jsonl"))


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_what_real_harnesses_send_goes_on(file):
    """A harness's second turn joins its first; requests with other openings, such as for a title, stand alone."""
    chains, names = Chains(), []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if isinstance(record["body"], dict):
            names.append(chains.trajectory(record.get("harness", ""), fields(record["body"])))
    assert len(set(names)) < len(names)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4), lambda x: st.lists(x) | st.dictionaries(st.text(max_size=9), x)
    )
)
def test_any_messages_have_a_name(messages):
    for name in ("messages", "input", "prompt", "instructions", "previous_response_id"):
        assert Chains().trajectory("me", fields({name: messages}))


# -- samples -----------------------------------------------------------------------------------------------------------


def test_a_rate_keeps_about_its_share_and_the_same_ones_everywhere():
    names = [f"t{n}" for n in range(4000)]
    kept = [name for name in names if is_kept(name, 0.25)]
    assert 900 < len(kept) < 1100
    assert kept == [name for name in names if is_kept(name, 0.25)]
    assert {name for name in names if is_kept(name, 0.1)} < set(kept)  # a lower rate keeps some of the same
    assert all(is_kept(name, 1.0) for name in names)
    assert not any(is_kept(name, 0.0) for name in names)


def test_a_trajectory_is_kept_whole_or_not_at_all(engine, start):
    with start(mode="record", sample_rate=0.5) as gateway:
        for turn in range(3):
            for n in range(20):
                history = [user(f"q{n}")] + [said(Sampled().text), user("on")] * turn
                assert gateway.post(CHAT, {"messages": history}).status == 200
                named = {"x-outrider-trajectory": f"named-{n}"}
                assert gateway.post(CHAT, {"messages": [user("same")]}, named).status == 200
        calls = gateway.store.calls_after(0)
        counts = {}
        for one in calls:
            counts[one.attempt_id] = counts.get(one.attempt_id, 0) + 1
        assert set(counts.values()) == {3}
        expected = {f"{TRAJECTORY_PREFIX}named-{n}" for n in range(20) if is_kept(f"{TRAJECTORY_PREFIX}named-{n}", 0.5)}
        assert {name for name in counts if "named" in name} == expected
        assert 5 < len(counts) < 35
        assert gateway.client.stats()["unsampled"] == 120 - len(calls)
        assert len(engine.received) == 120


def test_what_is_not_kept_is_passed_through_to_the_byte(engine, start):
    with start(mode="record", sample_rate=0.0) as gateway:
        body = b'{"messages":  [{"role": "user", "content": "x"}]}'
        got = gateway.post(CHAT, body, {"accept-encoding": "gzip"})
        assert got.status == 200
        assert engine.received[0].body == body
        assert engine.received[0].headers["accept-encoding"] == "gzip"
        assert gateway.store.calls_after(0) == []


def test_an_attempt_is_always_kept(engine, start):
    with start(mode="record", sample_rate=0.0) as gateway:
        gateway.chat(gateway.open())
        assert len(gateway.recorded(1)) == 1


def test_gateways_that_share_a_conversation_keep_it_whole_or_not_at_all(engine, tmp_path):
    options = {"mode": "record", "sample_rate": 0.5}
    store = tmp_path / "s.sqlite3"
    with RunningGateway(engine, store, **options) as one, RunningGateway(engine, store, **options) as other:
        for turn in range(4):
            for n in range(16):
                gateway = [one, other][(turn + n) % 2]
                history = [user(f"q{n}")] + [said(Sampled().text), user("on")] * turn
                assert gateway.post(CHAT, {"messages": history}).status == 200
        calls = one.store.calls_after(0)
    counts = Counter(call.attempt_id for call in calls)
    assert set(counts.values()) == {4}
    assert 2 < len(counts) < 14
