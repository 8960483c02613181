"""Cutting JSON text: only where it is certain, and no other byte changes."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.jsontext import replaced, text_pieces, value_spans

VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))


@given(st.lists(st.tuples(VALUES, VALUES), max_size=4), st.sampled_from([(",", ":"), (" , ", " : "), (",\n", ":\t")]))
def test_the_values_of_a_name_are_replaced_and_nothing_else(pairs, separators):
    text = json.dumps([{"other": other, "name": value} for other, value in pairs], separators=separators).encode()
    values = [item["name"] for item in msgspec.json.decode(text, type=list[dict[str, msgspec.Raw]])]
    spans = value_spans(text, b'"name"', values, b"0")
    if spans is None:  # a text that holds the name itself
        assert text.count(b'"name"') > len(pairs)
        return
    changed = replaced(text, spans)
    assert json.loads(changed) == [{"other": other, "name": 0} for other, _ in pairs]
    for other, _ in pairs:
        assert json.dumps(other, separators=separators).encode() in changed


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b'{"name":1,"x":{"name":1}}', [b"1"]),  # once more than it is known
        (b'{"x":1}', [b"1"]),
        (b'{"name":2}', [b"1"]),
        (b'{"x":"name","name":1}', [b"1"]),
        (b'{"\\"name":1}', [b"1"]),
    ],
)
def test_what_is_not_certain_is_left(text, values):
    assert value_spans(text, b'"name"', [msgspec.Raw(value) for value in values], b"0") is None


def test_nothing_to_change_gives_the_same_object():
    text = b'{"name":null}'
    assert replaced(text, value_spans(text, b'"name"', [msgspec.Raw(b"null")], b"null")) is text


@given(st.text(alphabet='ab \\"/\n\t\u00e9\u4e2d\U0001f600', max_size=60), st.booleans(), st.integers(1, 9))
def test_the_pieces_of_a_text_are_the_text(text, ascii, size):
    spelled = json.dumps(text, ensure_ascii=ascii).encode()[1:-1]
    pieces = list(text_pieces(memoryview(spelled), size))
    assert "".join(pieces) == text
    if spelled.isalpha():
        assert len(pieces) == -(-len(spelled) // size)
