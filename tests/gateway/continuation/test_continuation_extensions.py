"""Fields that only the engine knows, where the gateway makes the prompt and reads the answer from its ids."""

from __future__ import annotations

import pytest

from fakes.engine import json_answer, stream
from fakes.gateway import CHAT
from fakes.talk import USER

OWN = {"kv_transfer_params": {"block": 7}, "weight_version": "v3"}
ASKS = {
    CHAT: {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/responses": {"input": USER["content"]},
}


def answer(renderer, streamed):
    ids = renderer.text.encode("ok<|im_end|>")
    logprobs = {"tokens": [""] * len(ids), "token_logprobs": [-0.5] * len(ids)}
    choice = {"index": 0, "text": "ok", "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "prompt_logprobs": None}
    whole = {**head, **OWN, "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": len(ids)}}
    return stream(whole) if streamed else json_answer(whole)


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("streamed", [False, True])
def test_they_go_both_ways(engine, gateway, renderer, path, streamed):
    engine.answers.append(answer(renderer, streamed))
    ask = {"model": "m", "stream": streamed, "min_p": 0.25, "x_future": {"a": None}, **ASKS[path]}
    got = gateway.post(f"/s/{gateway.open()}{path}", ask)
    assert got.status == 200, got.body
    assert engine.received[0].path == "/v1/completions"
    assert engine.received[0].json["min_p"] == 0.25
    assert engine.received[0].json["x_future"] == {"a": None}
    if not streamed:
        found = got.json
    elif path == CHAT:
        found = got.events[-2]
    else:
        found = next(event.get("message") or event.get("response") for event in got.events)
    assert {name: found.get(name) for name in OWN} == OWN
    assert "prompt_logprobs" not in found
