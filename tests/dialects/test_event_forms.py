"""One stream in all the forms that an event stream may have: each dialect reads the same, and tells it well formed."""

from __future__ import annotations

import json

import pytest

from fakes.engine import Reply, Sampled
from outrider.gateway.options import load_dialects
from outrider.gateway.sse import EventSplitter, parse_event
from outrider.registry import BUILTIN

NAMES = tuple(BUILTIN["dialect"])
TRANSLATING = {dialect.name: dialect for dialect in load_dialects(NAMES, ("openai_chat", "openai_completions"))}
NATIVE = {dialect.name: dialect for dialect in load_dialects(NAMES, NAMES) if not dialect.name.startswith("openai_c")}
ASKS = {
    "openai_chat": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True},
    "openai_completions": {"model": "m", "prompt": "x", "stream": True},
    "anthropic_messages": {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
    },
    "openai_responses": {"model": "m", "input": "Hi", "stream": True},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
FORMS = ("lf", "crlf", "cr", "comments", "id", "several lines", "no space", "byte order mark", "no blank line")
EACH = pytest.mark.parametrize(
    ("kind", "name"), [*(("translating", name) for name in NAMES), *(("native", name) for name in sorted(NATIVE))]
)


def reader_of(kind, name, tokens=True):
    dialect = (TRANSLATING if kind == "translating" else NATIVE)[name]
    request = dialect.parse(json.dumps(ASKS[name]).encode())
    return dialect.reader(dialect.prepare(request, overrides={}, tokens=tokens, call_id="cafe"))


def chat_events(chat=True):
    asked = {"return_token_ids": True, "logprobs": True if chat else 1, "stream_options": {"include_usage": True}}
    sampled = [Sampled(tool_calls=[CALL] if chat else ())]
    reply = Reply(asked=asked, chat=chat, sampled=sampled, prompt_ids=[1, 2, 3], id="x")
    return [(b"", json.dumps(chunk, ensure_ascii=False).encode()) for chunk in reply.chunks()] + [(b"", b"[DONE]")]


def events_of(kind, name):
    if kind == "translating":
        return chat_events(name != "openai_completions")
    reader = reader_of("translating", name)  # the same answer in the dialect's own events
    told = b"".join(reader.event(parse_event(b"data: " + data + b"\n\n")) for _, data in chat_events())
    return [(event.name, event.data) for event in EventSplitter().feed(told + reader.end())]


def written(events, form):
    end = {"crlf": b"\r\n", "cr": b"\r"}.get(form, b"\n")
    lines = []
    for name, data in events:
        if form == "comments":
            lines += [b": ping", b"", b":", b""]
        if name:
            lines.append(b"event: " + name)
        if form == "id":
            lines += [b"id: 3", b"retry: 10"]
        parts = [data]
        if form == "several lines" and data != b"[DONE]":
            parts = json.dumps(json.loads(data), ensure_ascii=False, indent=1).encode().split(b"\n")
        space = b"" if form == "no space" else b" "
        lines += [*(b"data:" + space + part for part in parts), b""]
    text = b"".join(line + end for line in lines)
    if form == "byte order mark":
        text = "\ufeff".encode() + text
    return text.removesuffix(b"\n") if form == "no blank line" else text


def read(reader, pieces):
    splitter = EventSplitter()
    told = b"".join(reader.event(event) for piece in pieces for event in splitter.feed(piece))
    told += b"".join(reader.event(event) for event in splitter.end()) + reader.end()
    assert reader.finished
    assert not reader.error
    return told, repr(reader.result())


def understood(told):
    """What any client reads: each event with its name and what its data mean."""
    splitter = EventSplitter()
    events = [event for event in (*splitter.feed(told), *splitter.end()) if event.data]
    return [(event.name, event.data if event.data == b"[DONE]" else json.loads(event.data)) for event in events]


@EACH
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [True, False])
def test_every_form_of_a_stream_says_the_same(kind, name, form, tokens):
    events = events_of(kind, name)
    plain, plain_result = read(reader_of(kind, name, tokens), [written(events, "lf")])
    told, result = read(reader_of(kind, name, tokens), [written(events, form)])
    assert result == plain_result
    assert understood(told) == understood(plain)


@EACH
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_may_be_cut_anywhere(kind, name, form):
    data = written(events_of(kind, name), form)
    told, result = read(reader_of(kind, name), [data])
    cuts = [[data[:cut], data[cut:]] for cut in range(1, len(data), 29)]
    for pieces in (*cuts, [data[at : at + 1] for at in range(len(data))]):
        cut_told, cut_result = read(reader_of(kind, name), pieces)
        assert cut_result == result
        assert understood(cut_told) == understood(told)


@pytest.mark.parametrize("name", ["openai_chat", "openai_completions"])
def test_lines_beside_the_data_stay_where_something_is_hidden(name):
    data = written(events_of("translating", name), "id")
    told, _ = read(reader_of("translating", name), [data])
    assert b"token_ids" not in told
    assert told.count(b"id: 3\nretry: 10\ndata: ") == data.count(b"id: 3") - 1  # the usage that nobody asked for
