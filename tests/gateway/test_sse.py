"""Cutting a stream into events, whatever the network does to it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.engine import sse
from outrider.gateway.sse import EventSplitter


def split(body, cuts=()):
    splitter = EventSplitter()
    events = []
    start = 0
    for cut in sorted({cut for cut in cuts if cut <= len(body)} | {len(body)}):
        events += splitter.feed(body[start:cut])
        start = cut
    return events + splitter.end()


def data_of(body, cuts=()):
    return [event.data for event in split(body, cuts) if event.data]


def by_the_book(body):
    """The data of each event as the WHATWG text says it, over the whole body at once; a rest without end counts."""
    found, data = [], []
    for line in [*re.split(rb"\r\n|\n|\r", body), b""]:
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line == b"data" or line.startswith(b"data:"):
            value = line[5:]
            data.append(value[1:] if value.startswith(b" ") else value)
    return [value for value in found if value]


LINES = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"data:  c ",
        b'data: {"x":"\xe2\x80\xa8 \xc2\x85 \xf0\x9f\x98\x80 \x0b\x0c"}',
        b"event: x",
        b"id: 3",
        b": ping",
        b":",
        b"retry: 5",
        b"dataset: no",
        b"",
        b"",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
BODIES = st.lists(st.tuples(LINES, ENDS), max_size=12).map(lambda parts: b"".join(a + b for a, b in parts))


@given(BODIES, st.lists(st.integers(0, 200), max_size=8))
def test_S01_S02_any_cut_gives_the_same_data_and_every_byte_once(body, cuts):
    assert b"".join(event.raw for event in split(body, cuts)) == body
    assert data_of(body, cuts) == by_the_book(body)


@given(st.lists(st.integers(0, 400), max_size=6))
def test_S01_a_usual_stream_is_cut_into_its_events_exactly(cuts):
    chunks = sse({"a": "né"}, {"b": "😀"}, {"c": 1})
    assert [event.raw for event in split(b"".join(chunks), cuts)] == chunks


def test_S02_fixtures():
    assert data_of(b": ping\n\n:\n\n") == []
    assert data_of(b'data:{"a":1}\r\n\r\n') == [b'{"a":1}']
    assert data_of(b"data: one\ndata: two\n\n") == [b"one\ntwo"]
    (event,) = split(b"event: x\nid: 3\ndata: {}\n\n")
    assert (event.name, event.data) == (b"x", b"{}")
    assert data_of(b"data: last") == [b"last"]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_an_event_is_given_as_soon_as_its_blank_line_is_there(end):
    splitter = EventSplitter()
    body = b"data: a" + end
    assert sum(len(splitter.feed(body[i : i + 1])) for i in range(len(body))) == 1


def test_a_long_event_in_many_reads_costs_linear_time():
    """4 MB in 4,000 reads took minutes when each read searched everything again."""
    splitter = EventSplitter()
    for _ in range(4000):
        assert splitter.feed(b"x" * 1000) == []
    (event,) = splitter.feed(b"\n\n")
    assert len(event.raw) == 4_000_002
