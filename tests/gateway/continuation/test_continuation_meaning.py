"""Which requests mean the same: echoes are told from changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.gateway.continuation.meaning import NotText, canonical_arguments, plain_messages, read_talk

HI = {"role": "user", "content": "hi"}


def chain(*messages, head=b""):
    return read_talk(head, plain_messages(messages)).chain[-1]


def said(arguments='{"a": 1}', *, content=None, call_id="c1", tool="add", **fields):
    call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call], **fields}


def result(content, call_id="c1", **fields):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HI, {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}),
        (HI, {"content": "hi", "role": "user"}),
        (HI, {**HI, "x_unknown": {"a": 1}}),
        (said(content=None), said(content="")),
        (said(content=None), said(content=[])),
        (said(), {key: value for key, value in said().items() if key != "content"}),
        (said(), said(refusal=None, annotations=[], audio=None, function_call=None, name="planner")),
        (said(reasoning_content="hm"), said(reasoning="hm\n")),
    ],
)
def test_A10_cosmetic_differences_are_none(one, other):
    assert chain(one) == chain(other)
    assert chain(HI, one, HI) == chain(HI, other, HI)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (HI, {"role": "user", "content": "hi "}),
        (HI, {"role": "system", "content": "hi"}),
        (HI, {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}),
        (HI, {**HI, "name": "bob"}),
        (said(), said(tool="sub")),
        (said(), said(content="x")),
        (said(), said(reasoning_content="hm")),
        (said(), {"role": "assistant", "content": ""}),
    ],
)
def test_A10_real_differences_are_differences(one, other):
    assert chain(one) != chain(other)
    assert chain(one, HI) != chain(other, HI)


def test_A10_another_image_is_another_message():
    """No template here writes an image, so such a request is left to the engine, and continues nothing."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    with pytest.raises(NotText, match="image_url"):
        plain_messages([{"role": "user", "content": [{"type": "text", "text": "hi"}, image]}])


@pytest.mark.parametrize(
    "echo",
    [
        '{"n": 1, "path": "\\u00e9"}',
        '{"n":1,"path":"é"}',
        '{ "path" : "é" , "n" : 1.0 }',
        '{"n": 1e0, "path": "\\u00E9"}',
    ],
)
def test_T15_arguments_are_compared_by_what_they_parse_to(echo):
    assert chain(HI, said('{"path":"é","n":1.0}')) == chain(HI, said(echo))


def test_T15_html_escapes_are_only_escapes():
    assert canonical_arguments('{"a": "<b> & \'c\'"}') == canonical_arguments(
        '{"a": "\\u003cb\\u003e \\u0026 \\u0027c\\u0027"}'
    )


@pytest.mark.parametrize(
    "other",
    [
        '{"path":"e","n":1}',
        '{"path":"é","n":2}',
        '{"path":"é","n":"1"}',
        '{"path":"é","n":true}',
        '{"path":"é"}',
        '{"path":"é","n":1.5}',
        '{"path":"é ","n":1}',
        '{"path":"é","n":[1]}',
        '{"path":"é","n":1',
    ],
)
def test_T15_other_arguments_are_others(other):
    assert chain(said('{"path":"é","n":1}')) != chain(said(other))


def test_T08_odd_arguments_have_a_meaning_too():
    assert canonical_arguments("") == canonical_arguments(" ") == canonical_arguments("{}")
    assert canonical_arguments('{"a":1,"a":2}') == canonical_arguments('{"a":2}')
    texts = ["{bad", "[1]", "[1 ]", '"x"', "null", "{}", '{"a":1e999}', '{"a":-1e999}', '{"a":"\\ud800"}', '{"a":NaN}']
    assert len({chain(said(text)) for text in texts}) == len(texts)
    assert chain(said('{"a": 123456789012345678901234567890}')) == chain(said('{"a":123456789012345678901234567890}'))


def test_ids_of_calls_say_nothing_but_which_result_belongs_to_which():
    two = said(), said(call_id="c2")
    assert chain(HI, said(), result("5")) == chain(HI, said(call_id="x9"), result("5", "x9"))
    assert chain(*two, result("5"), result("6", "c2")) != chain(*two, result("5", "c2"), result("6"))
    assert chain(said(), result("5", "lost")) != chain(said(), result("5"))


@pytest.mark.parametrize("form", [str, lambda text: [{"type": "text", "text": line} for line in text.split("\n", 1)]])
def test_A06_only_the_billing_line_is_left_out(form):
    def system(text):
        return {"role": "system", "content": form(text)}

    line = "x-anthropic-billing-header: cc_version=9.9; cch={};\n"
    first, second = (system(line.format(hash) + "You are S.\nMore.") for hash in ("a1b2", "c3d4"))
    assert chain(first, HI) == chain(second, HI)
    assert plain_messages([first])[0]["content"] == "You are S.\nMore."
    assert chain(first, HI) != chain(system(line.format("a1b2") + "You are T.\nMore."), HI)
    ends = [system(f"You are S.\nbudget {n}") for n in (1, 2)]
    assert chain(ends[0]) != chain(ends[1])
    user = {"role": "user", "content": line.format("a1b2") + "what is this?"}
    assert plain_messages([user])[0] == user
    late = {"role": "system", "content": line.format("a1b2") + "x"}
    assert plain_messages([HI, late])[1] == late
    assert plain_messages([{"role": "system", "content": line.format("a")}, HI]) == [HI]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.integers(0, 4), st.booleans(), st.booleans())
def test_T15_any_way_to_write_arguments_is_the_same(value, indent, ascii_only, ordered):
    plain = json.dumps(value)
    echo = json.dumps(dict(reversed(value.items())), indent=indent or None, ensure_ascii=ascii_only, sort_keys=ordered)
    assert canonical_arguments(plain) == canonical_arguments(echo)


@given(
    st.dictionaries(st.text(max_size=2), json_values, max_size=2),
    st.dictionaries(st.text(max_size=2), json_values, max_size=2),
)
def test_T15_values_that_differ_are_told_apart(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or one == other
    if not same:
        assert chain(said(json.dumps(one))) != chain(said(json.dumps(other)))
