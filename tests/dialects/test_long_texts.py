"""Large requests that are translated: the same chat request as ever, and no second copy of their texts in memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from outrider.dialects import long_texts, utf8
from outrider.dialects.anthropic_messages import AnthropicMessages
from outrider.dialects.openai_responses import OpenAIResponses
from outrider.dialects.openai_responses_history import RecentResponses
from outrider.errors import RequestError

TEXT = 'A "line"\\ of text,\n\tna\u00efve \u4e2d\u6587 \U0001f600 and 1.5e3 <0:0>. '
LONG = TEXT * 9_000
PICTURE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K" * 80_000}

BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "short"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": LONG},
            {"type": "text", "text": TEXT * 30},
            {"type": "tool_use", "id": "t1", "name": "write", "input": {"content": LONG, "path": "a"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": LONG},
            {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": LONG}]},
            {"type": "tool_result", "tool_use_id": "t3", "is_error": True, "content": LONG},
            {"type": "tool_result", "tool_use_id": "t4", "is_error": True, "content": LONG + "error"},
            {"type": "image", "source": PICTURE},
            {"type": "document", "title": "T", "source": {"type": "text", "data": LONG}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": LONG}]}},
        ],
    },
    {"role": "system", "content": LONG},
]
ITEMS = [
    {"role": "developer", "content": LONG},
    {"role": "user", "content": [{"type": "input_text", "text": LONG}, {"type": "input_text", "text": LONG}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": LONG}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": json.dumps({"x": LONG})},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": LONG},
    {"type": "function_call_output", "call_id": "c1", "output": LONG},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": LONG}]},
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": "data:image/png;base64," + PICTURE["data"]},
            {"type": "input_file", "file_data": "data:text/plain;base64," + PICTURE["data"], "filename": "f"},
        ],
    },
]
CASES = {
    "messages": (AnthropicMessages, {"max_tokens": 9, "messages": [{"role": "user", "content": LONG * 2}]}),
    "messages, blocks": (AnthropicMessages, {"max_tokens": 9, "messages": BLOCKS}),
    "messages, no system after the first": (
        lambda: AnthropicMessages(late_system="user"),
        {"max_tokens": 9, "messages": BLOCKS},
    ),
    "responses": (lambda: responses(), {"input": LONG * 2}),
    "responses, items": (lambda: responses(), {"input": ITEMS}),
}


def responses(**options):
    return OpenAIResponses(history=RecentResponses(max_bytes=1 << 20), **options)


def prepared(dialect, body, **options):
    request = dialect.parse(body)
    return dialect.prepare(request, overrides={}, tokens=True, owner="o", call_id="c", **options)


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_what_goes_upstream_is_what_it_would_be_for_a_small_request(case, ascii, monkeypatch):
    make, fields = CASES[case]
    body = json.dumps({"model": "m", **fields}, ensure_ascii=ascii).encode()
    assert len(body) > long_texts.LARGE
    large = prepared(make(), body)
    monkeypatch.setattr(long_texts, "LARGE", 1 << 40)
    small = prepared(make(), body)
    assert json.loads(large.body) == json.loads(small.body)
    assert (large.notes, large.hidden, large.sampling) == (small.notes, small.hidden, small.sampling)


def test_a_prompt_is_counted_with_its_long_texts():
    body = json.dumps({"model": "m", "messages": BLOCKS}).encode()
    assert json.loads(AnthropicMessages().count_request(body).body)["messages"][0]["content"] == f"{LONG}\nshort"


def test_a_response_that_is_kept_is_kept_with_its_texts():
    dialect = OpenAIResponses()  # keeps longer ones than this
    request = prepared(dialect, json.dumps({"model": "m", "input": LONG * 4}).encode())
    reply = {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}]}
    dialect.reader(request).body(json.dumps(reply).encode())
    again = {"model": "m", "previous_response_id": "resp_c", "input": "and?"}
    assert json.loads(prepared(dialect, json.dumps(again).encode()).body)["messages"][0]["content"] == LONG * 4


@pytest.mark.parametrize(
    "wrong", [{"role": LONG * 4}, {"role": "user", "content": {"text": LONG * 4}}, {"role": "user", "content": [LONG]}]
)
def test_what_is_wrong_with_a_large_request_is_told_as_of_a_small_one(wrong, monkeypatch):
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [wrong, *BLOCKS]}).encode()
    with pytest.raises(RequestError) as large:
        prepared(AnthropicMessages(), body)
    monkeypatch.setattr(long_texts, "LARGE", 1 << 40)
    with pytest.raises(RequestError) as small:
        prepared(AnthropicMessages(), body)
    assert str(large.value) == str(small.value)


SHAPES = {
    "text": [{"role": "user", "content": "word " * 1_000_000}],
    "one emoji": [{"role": "user", "content": "word " * 1_000_000 + "\U0001f600"}],
    "blocks": [{"role": "user", "content": [{"type": "text", "text": "word " * 500_000}] * 2}],
    "tool results": [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{n}", "content": "word " * 2_000}]}
        for n in range(500)
    ],
    "image": [{"role": "user", "content": [{"type": "image", "source": PICTURE | {"data": "iVBORw0K" * 600_000}}]}],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_request_is_translated_with_one_copy_of_its_texts(shape):
    fields = {"model": "m", "max_tokens": 9, "messages": SHAPES[shape]}
    body = json.dumps(fields, ensure_ascii=False).encode()
    dialect = AnthropicMessages()
    tracemalloc.start()
    try:
        request = prepared(dialect, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(request.body) > 0.9 * len(body)
    assert peak < 1.5 * len(body)


@pytest.mark.parametrize("at", [0, 1, utf8.SLICE - 2, utf8.SLICE - 1, utf8.SLICE, 2 * utf8.SLICE + 7])
def test_utf8_is_checked_across_slices(at):
    good = bytearray("\U0001f600" * (3 * utf8.SLICE // 4 + 5), "utf-8")
    utf8.check_utf8(bytes(b"x" * (at % 4) + good))
    bad = good[: at - at % 4] + b"ab\xffcd" + good[at - at % 4 :]
    with pytest.raises(UnicodeDecodeError) as found:
        utf8.check_utf8(bytes(bad))
    assert found.value.start == at - at % 4 + 2
    with pytest.raises(UnicodeDecodeError):
        utf8.check_utf8(bytes(good[:-1]))
