"""The real model, greedy: exact continuation and the engine's own rendering say the same."""

from __future__ import annotations

import pytest

from fakes.gateway import RunningGateway
from fakes.real_engine import MODEL, RealEngine
from outrider.engines.embedded.weights import resolve_model
from outrider.trajectory import build as build_tree
from outrider.types import Fidelity

pytestmark = pytest.mark.model

PARTS = [{"type": "text", "text": "And of Italy?"}, {"type": "text", "text": "Answer in one sentence."}]
QUESTIONS = ["What is the capital of France?", PARTS, "Which of the two is larger? Answer briefly."]


@pytest.fixture(scope="module")
def folder():
    return resolve_model(MODEL)


def talk(gateway, attempt_id, *, stream):
    """The answers to `QUESTIONS` in one conversation."""
    key = gateway.open(attempt_id)
    messages, said = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        got = gateway.chat(key, messages=messages, temperature=0, max_tokens=32, stream=stream)
        assert got.status == 200, got.body
        if stream:
            deltas = [choice["delta"] for chunk in got.events[:-1] for choice in chunk["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
        else:
            text = got.json["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        said.append(text)
    return said


def test_greedy_text_is_the_same(folder, tmp_path):
    said, prompts = {}, {}
    with RealEngine(folder) as engine:
        for tokens in ("gateway", "engine"):
            options = {"mode": "train", "tokens": tokens, "tokenizer": str(folder)}
            with RunningGateway(engine, tmp_path / f"{tokens}.sqlite3", **options) as gateway:
                said[tokens] = talk(gateway, "plain", stream=False)
                assert talk(gateway, "streamed", stream=True) == said[tokens]
                calls = gateway.recorded(len(QUESTIONS), "plain")
                prompts[tokens] = [call.prompt_ids.tolist() for call in calls]
                assert {call.fidelity for call in calls} == {Fidelity.EXACT}
                if tokens == "gateway":
                    assert len([b for b in build_tree(calls).branches if b.parent is None]) == 1
                    counted = gateway.client._request("GET", "/admin/stats")["continuation"]
                    assert counted == {"opened": 2, "continued": 2 * (len(QUESTIONS) - 1)}
    assert said["gateway"] == said["engine"]
    assert all(said["gateway"])
    assert prompts["gateway"] == prompts["engine"]
