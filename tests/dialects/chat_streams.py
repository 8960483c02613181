"""Chat-completions answers for tests of the dialects that translate, and readers of what comes out."""

from __future__ import annotations

import importlib
import json
from typing import Any

import openai
from hypothesis import strategies as st

Json = dict[str, Any]

# The SDKs' own HTTP library, under the name that this version of them knows it by.
http: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def chunk(delta: Json, finish_reason: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "created": 17, "model": "m", "choices": [choice], **more}


def call_delta(
    index: int | None = None, id: str | None = None, name: str | None = None, args: str | None = None
) -> Json:
    function = {key: value for key, value in (("name", name), ("arguments", args)) if value is not None}
    call: Json = {"function": function}
    if index is not None:
        call["index"] = index
    if id is not None:
        call["id"] = id
    return call


def calls(*deltas: Json) -> Json:
    return chunk({"tool_calls": list(deltas)})


def end(finish_reason: str = "stop") -> list[Json]:
    return [chunk({}, finish_reason), {"choices": [], "usage": USAGE}]


def plain(message: Json, finish_reason: str = "stop", **choice: Any) -> Json:
    first = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason, **choice}
    return {"id": "chatcmpl-1", "created": 17, "model": "m", "choices": [first], "usage": USAGE}


def run(translator: Any, chunks: list[Json]) -> list[Json]:
    """The events of a whole stream, each checked to be one whole server-sent event named after its type."""
    raw = [event for one in chunks for event in translator.feed(one)] + translator.finish()
    return [read_event(event) for event in raw]


def read_event(raw: bytes) -> Json:
    assert raw.endswith(b"\n\n")
    name, data = raw[:-2].split(b"\n")
    event: Json = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: " + event["type"].encode()
    return event


# -- random answers ----------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, width=32) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.one_of(
    st.dictionaries(texts, values, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False)),
    st.just(""),
    st.just("{bad"),
    st.just("[1]"),
)
tool_calls = st.lists(st.tuples(st.sampled_from(["read", "eager", "patch"]), arguments), max_size=3)
messages = st.fixed_dictionaries({
    "reasoning": st.just("") | texts,
    "text": st.just("") | texts,
    "calls": tool_calls,
    "finish_reason": st.sampled_from(["stop", "tool_calls", "length"]),
})  # fmt: skip


def as_plain(message: Json) -> Json:
    found = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": args}}
        for index, (name, args) in enumerate(message["calls"])
    ]
    body = {"content": message["text"] or None, "reasoning_content": message["reasoning"], "tool_calls": found}
    return plain(body, message["finish_reason"])


@st.composite
def as_chunks(draw: st.DrawFn, message: Json) -> list[Json]:
    """The same answer as a stream: cut anywhere, calls interleaved, ids and names repeated or not."""
    name = draw(st.sampled_from(["reasoning_content", "reasoning", "thinking"]))
    chunks = [chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3])]
    chunks += [chunk({name: piece}) for piece in draw(_cut(message["reasoning"]))]
    chunks += [chunk({"content": piece, "tool_calls": []}) for piece in draw(_cut(message["text"]))]
    repeat = draw(st.booleans())
    waiting = []
    for index, (tool, args) in enumerate(message["calls"]):
        first, *rest = draw(_cut(args)) or [""]
        waiting.append([call_delta(index, f"call_{index}", tool, first)])
        for piece in rest:
            waiting[-1].append(
                call_delta(index, f"call_{index}", tool, piece) if repeat else call_delta(index, args=piece)
            )
    begun = 0
    while any(waiting):
        ready = [index for index, deltas in enumerate(waiting) if deltas and index <= begun]
        index = draw(st.sampled_from(ready))
        begun = max(begun, index + 1)
        chunks.append(calls(waiting[index].pop(0)))
    return [*chunks, *end(message["finish_reason"])]


@st.composite
def _cut(draw: st.DrawFn, text: str) -> list[str]:
    if not text:
        return []
    places = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=4)))
    pieces = [text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True)]
    return [piece for piece in pieces if piece]
