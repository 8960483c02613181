from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.reports import text
from outrider.reports.markup import esc

ANYTHING = st.text(st.characters(categories=["C", "L", "N", "P", "S", "Z", "M"]), max_size=60)


@given(ANYTHING)
def test_clean_leaves_nothing_that_steers_a_terminal_or_reorders_a_line(raw):
    cleaned = text.clean(raw)
    cleaned.encode("utf-8")  # no lone surrogate
    for letter in cleaned:
        assert letter in "\n\t" or unicodedata.category(letter) != "Cc"
        assert unicodedata.bidirectional(letter) not in {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
        assert letter not in "\u2028\u2029\u200b\ufeff"


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=60))
def test_clean_keeps_ordinary_text(raw):
    assert text.clean(raw) == raw


def test_clean_shows_what_it_replaced_and_says_what_it_cut():
    assert text.clean("a\x1b[31mb\u202ec") == "a⟨U+001B⟩[31mb⟨U+202E⟩c"
    assert text.clean("family \U0001f468\u200d\U0001f469 ok") == "family \U0001f468\u200d\U0001f469 ok"
    assert text.clean("one\r\ntwo") == "one\ntwo"
    assert text.clean("x" * 1500, 100) == "x" * 100 + " … (1,400 more characters)"


@given(ANYTHING)
def test_one_line_is_one_line_and_short(raw):
    line = text.one_line(raw, 20)
    assert "\n" not in line
    assert "\t" not in line
    assert len(line) <= 20


@given(ANYTHING)
def test_escaped_text_opens_no_tag_and_no_attribute(raw):
    escaped = esc(raw)
    assert not set(escaped) & set("<>\"'")
    assert "\x1b" not in escaped


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "nan"),
        (True, "True"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.123456, "0.123"),
        (-0.5, "-0.5"),
        (234.7, "235"),
        (2e-5, "2.0e-5"),
        (3.5e-12, "3.5e-12"),
    ],
)
def test_number(value, shown):
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (60, "1 min 00 s"), (3599.6, "1 h 00 min"), (None, "–")],
)
def test_duration(seconds, shown):
    assert text.duration(seconds) == shown


def test_percent_and_sizes():
    assert [text.percent(value) for value in (0.69, 0.835, 1.0, 0, None)] == ["69%", "83.5%", "100%", "0%", "–"]
    assert text.aligned_percent(0.69) == "69.0%"
    assert text.gigabytes(7_940_000_000) == "7.9 GB"


def test_tally_puts_the_largest_first():
    assert text.tally({"too_long": 1, "zero_variance": 12}) == "zero variance 12, too long 1"
