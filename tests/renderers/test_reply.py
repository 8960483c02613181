"""Answers parsed from ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.chat_format import spelled_out
from outrider.wire import ParsedCall, ReplyDelta

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b":"é"}}\n</tool_call>'
PARSED = ParsedCall("add", '{"a": 1,  "b":"é"}')


def parse(renderer, ids, *, tools=TOOLS, prompt=""):
    parser = renderer.parser(renderer.text.encode(prompt), tools)
    return joined([parser.feed([token]) for token in ids] + [parser.finish()])


def joined(parts):
    return ReplyDelta(
        reasoning="".join(part.reasoning for part in parts),
        content="".join(part.content for part in parts),
        calls=tuple(call for part in parts for call in part.calls),
    )


@pytest.fixture(params=["smol", "qwen"])
def either(request, renderers):
    """A vocabulary that has the markers as tokens, and one that spells them."""
    return renderers[request.param]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hello.\n", "", "Hello.\n", ()),
        ("  a ", "", "  a ", ()),
        ("", "", "", ()),
        ("\n", "", "\n", ()),
        ("<think>\nhm\n</think>\n\nHello", "hm", "Hello", ()),
        ("<think>\n\n</think>\n\nHello", "", "Hello", ()),
        ("a <think>b</think>", "", "a <think>b</think>", ()),
        ("<think>never ended", "never ended", "", ()),
        (CALL, "", "", (PARSED,)),
        (f"Let me see. \n{CALL}\n{CALL}\n", "", "Let me see.", (PARSED, PARSED)),
        (f"<think>\nhm\n</think>\n\n{CALL}", "hm", "", (PARSED,)),
        (f"{CALL}\nDone.", "", "Done.", (PARSED,)),
        ('<tool_call>{"name": "add"}</tool_call>', "", "", (ParsedCall("add", "{}"),)),
        ('<tool_call>[{"name": "a"}, {"name": "b", "arguments": {}}]</tool_call>', "", "",
         (ParsedCall("a", "{}"), ParsedCall("b", "{}"))),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "",
         (ParsedCall("add", '{"a": 1}'),)),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', "", "", (ParsedCall("add", '{"a": 1}'),)),
        ("x <tool_call>{bad</tool_call>", "", "x <tool_call>{bad</tool_call>", ()),
        ("x <tool_call>{bad", "", "x <tool_call>{bad", ()),
        ("1 </tool_call> 2", "", "1 </tool_call> 2", ()),
    ],
)  # fmt: skip
def test_what_an_answer_says(either, text, reasoning, content, calls):
    assert parse(either, either.text.encode(text + "<|im_end|>")) == (reasoning, content, calls)


def test_without_tools_a_call_is_text(either):
    assert parse(either, either.text.encode(CALL), tools=[]).content == CALL


def test_a_thought_may_begin_in_the_prompt(either):
    found = parse(either, either.text.encode("hm\n</think>\n\nHello"), prompt="<|im_start|>assistant\n<think>\n")
    assert found == ("hm", "Hello", ())


def test_where_a_marker_is_a_token_its_spelling_is_text(qwen):
    spelled = spelled_out(qwen.text._full, CALL)
    assert parse(qwen, spelled) == ("", CALL, ())


def test_calls_that_are_a_whole_answer(llama):
    text = '{"name": "add", "parameters": {"a": 1}}'
    assert parse(llama, llama.text.encode(text + "<|eot_id|>")) == ("", "", (ParsedCall("add", '{"a": 1}'),))
    for other in ('{"name": "other", "parameters": {}}', "{not a call", '{"a": 1} is JSON'):
        assert parse(llama, llama.text.encode(other)) == ("", other, ())
    assert parse(llama, llama.text.encode(text), tools=[]) == ("", text, ())


def test_a_character_cut_over_tokens_comes_whole_or_not_at_all(smol):
    ids = spelled_out(smol.text._full, "né 😀!")
    parser = smol.parser([], [])
    parts = [parser.feed([token]).content for token in ids]
    assert "".join(parts) == "né 😀!"
    assert not any("\ufffd" in part for part in parts)
    assert parse(smol, ids[:-2]).content == "né "


@given(
    text=st.text(alphabet='ab {}<>/\n"é😀', max_size=30), cuts=st.lists(st.integers(1, 5), max_size=60), data=st.data()
)
def test_however_an_answer_is_cut_it_is_the_same(renderers, text, cuts, data):
    renderer = renderers[data.draw(st.sampled_from(["smol", "qwen", "llama"]))]
    markers = st.sampled_from(["", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "add"}'])
    whole = data.draw(markers) + text + data.draw(markers) + data.draw(markers)
    ids = spelled_out(renderer.text._full, whole) if data.draw(st.booleans()) else renderer.text.encode(whole)
    parser = renderer.parser([], TOOLS)
    parts, at = [], 0
    for size in cuts:
        parts.append(parser.feed(ids[at : at + size]))
        at += size
    found = joined([*parts, parser.feed(ids[at:]), parser.finish()])
    assert found == parse(renderer, ids)
