"""Bodies that are nested deeply, and values of other types than anybody expects, in every mode: refused or recorded."""

from __future__ import annotations

import json

import pytest

from fakes.engine import Answer, entries, plain, sse
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES
from outrider.types import Mode

SIMPLE = {
    CHAT: {"model": "policy", "messages": MESSAGES},
    COMPLETIONS: {"model": "policy", "prompt": "Hi"},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": MESSAGES},
    "/v1/responses": {"model": "policy", "input": "Hi"},
}
IN_MESSAGE = '"messages": [{"role": "user", "content": %s}]'
PLACES = {
    "content": IN_MESSAGE + ', "input": [{"role": "user", "content": %s}], "prompt": %s',
    "tool": '"tools": [{"type": "function", "name": "f", "function": {"parameters": %s}, "parameters": %s}]',
    "result": IN_MESSAGE.replace("%s", '[{"type": "tool_result", "tool_use_id": "x", "content": %s}]'),
    "arguments": '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}]',
    "unknown": '"x_future": %s',
    "metadata": '"metadata": %s, "user": "me"',
}
WRAPS = {"lists": ("[", "]"), "objects": ('{"a":', "}"), "blocks": ('[{"type":"tool_result","content":', "}]")}
DEPTHS = (300, 490, 950, 20_000)


@pytest.fixture
def gateway(start):
    with start(mode="record", redact="all", upstream_retries=0, health_fall=10**6) as gateway:
        yield gateway


def nested(wrap, depth):
    opening, closing = WRAPS[wrap]
    return opening * depth + '"x"' + closing * depth


def is_kept_or_refused(engine, gateway, got):
    assert got.status < 500, got.body
    stats = gateway.client.stats()
    assert stats["not_recorded"] == {}
    assert "gateway" not in stats["refused"]
    assert len(gateway.store.calls_after(0)) == len(engine.received)


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("path", SIMPLE)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_request_that_is_nested_deeply(engine, gateway, caplog, keyed, path, place, wrap):
    for depth in DEPTHS:
        fields = PLACES[place].replace("%s", nested(wrap, depth))
        text = json.dumps(SIMPLE[path])[:-1] + ", " + fields + "}"
        prefix = f"/s/{gateway.open(f'attempt-{depth}')}" if keyed else ""
        engine.answers.append(plain({}))
        is_kept_or_refused(engine, gateway, gateway.post(prefix + path, text.encode()))
    assert not caplog.records


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_an_answer_that_is_nested_deeply(engine, gateway, caplog, streamed, path, wrap):
    for depth in DEPTHS:
        good = plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}).chunks[0].decode()
        body = (
            good.replace('"x"', nested(wrap, depth), 1)
            if depth % 20
            else good[:-1] + ', "x": ' + nested(wrap, depth) + "}"
        )
        if streamed:
            chunks = [b"data: " + body.replace('"message"', '"delta"').encode() + b"\n\n", *sse()]
            engine.answers.append(Answer(headers={"content-type": "text/event-stream"}, chunks=chunks))
        else:
            engine.answers.append(Answer(chunks=[body.encode()]))
        key = gateway.open(f"attempt-{depth}", mode=Mode.TRAIN)
        got = gateway.post(f"/s/{key}{path}", SIMPLE[path] | {"stream": streamed})
        assert got.status in (200, 502)
        assert gateway.client.stats()["not_recorded"] == {}
        assert len(gateway.store.calls_after(0)) == len(engine.received)
    assert not caplog.records


ODD_TYPES = ['{"a": 1}', "[1]", "5", '"\\ud83d"', "1e999", "1" + "0" * 400]


SHAPES = [
    '"messages": [{"role": "user", "content": [{"type": %s, "text": "x"}]}]',
    '"messages": [{"role": "assistant", "tool_calls": %s, "content": "x"}, {"role": "user", "content": "x"}]',
    '"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": %s, "input": %s}]}]',
    '"messages": [{"role": "user", "type": %s, "content": "x"}]',
    '"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": %s, "arguments": %s}}]}]',
    '"input": [{"type": %s, "role": "user", "content": "x"}]',
    '"input": [{"type": "function_call", "name": %s, "arguments": %s, "call_id": %s}]',
    *(
        f'"{name}": %s'
        for name in (
            "previous_response_id", "prompt", "system", "instructions", "model", "user", "messages", "input", "top_k",
            "stop", "temperature", "max_tokens", "logit_bias", "n", "return_token_ids", "logprobs", "stream_options",
            "stream", "tools", "tool_choice", "response_format", "metadata", "chat_template_kwargs", "thinking",
            "reasoning", "text", "store", "include", "max_output_tokens", "stop_sequences",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("path", SIMPLE)
@pytest.mark.parametrize("odd", ODD_TYPES)
def test_values_of_other_types(engine, gateway, caplog, keyed, path, odd):
    prefix = f"/s/{gateway.open()}" if keyed else ""
    for shape in SHAPES:
        text = json.dumps(SIMPLE[path])[:-1] + ", " + shape.replace("%s", odd) + "}"
        engine.answers.append(plain({}))
        is_kept_or_refused(engine, gateway, gateway.post(prefix + path, text.encode()))
    assert not caplog.records
