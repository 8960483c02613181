"""Text of a stream: whole characters, stop strings held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engines.embedded.text import TextStream


def test_S01_two_tokens_that_are_half_an_emoji_each():
    stream = TextStream([])
    smile = "\N{GRINNING FACE}".encode()
    assert [stream.push(smile[:2]), stream.push(smile[2:]), stream.finish()] == ["", "\N{GRINNING FACE}", ""]


def test_S01_line_separators_inside_text_are_text():
    stream = TextStream([])
    assert stream.push("a\u2028b".encode()) == "a\u2028b"


def test_a_character_left_incomplete_at_the_end_is_dropped():
    stream = TextStream([])
    assert stream.push(b"ok\xf0\x9f") + stream.finish() == "ok"


def test_bytes_that_are_no_text_are_replaced_and_hold_nothing_up():
    stream = TextStream([])
    assert stream.push(b"\xff") == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(b"a") == "a"


def test_T12_a_stop_string_over_several_tokens_never_shows():
    stream = TextStream(["OBSERVATION:"])
    pieces = [stream.push(data) for data in (b"do it\n", b"OBS", b"ERVA", b"TION:")]
    assert pieces == ["do it\n", "", "", ""]
    assert stream.matched == "OBSERVATION:"
    assert stream.finish() == ""


def test_what_only_began_like_a_stop_string_is_released():
    stream = TextStream(["stop"])
    assert [stream.push(b"s"), stream.push(b"t"), stream.push(b"uck"), stream.finish()] == ["", "", "stuck", ""]
    assert TextStream(["stop"]).push(b"st") == ""
    late = TextStream(["stop"])
    late.push(b"st")
    assert late.finish() == "st"


def test_text_after_a_stop_string_in_the_same_token_is_cut():
    stream = TextStream(["b"])
    assert stream.push(b"abc") == "a"
    assert stream.finish() == ""


@pytest.mark.parametrize(("stops", "text", "found"), [(["ab", "b"], "xab", "ab"), (["b", "abc"], "ab", "b")])
def test_the_stop_string_that_begins_first_wins(stops, text, found):
    stream = TextStream(stops)
    stream.push(text.encode())
    assert stream.matched == found


@given(st.text(), st.lists(st.integers(0, 40)))
def test_pieces_join_to_the_text_wherever_it_is_cut(text, cuts):
    data = text.encode("utf-8", "ignore")
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    stream = TextStream([])
    pieces = [stream.push(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + stream.finish() == data.decode()


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_byte_by_byte_the_text_ends_before_the_first_stop_string(text, stops):
    stream, out = TextStream(stops), ""
    for byte in text.encode():
        out += stream.push(bytes([byte]))
        if stream.matched is not None:
            break
    out += stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:  # found at the first place where one is complete
        assert text[: min(ends)] == out + str(stream.matched)
    else:
        assert (out, stream.matched) == (text, None)
