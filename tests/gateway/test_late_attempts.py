"""R08: an attempt that was given up can do no harm to the one that took its place."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import anthropic
import openai
import pytest

from fakes.engine import Answer, Reply, Sampled, stream
from fakes.gateway import CHAT, MESSAGES, wait_for
from fakes.records import make_rollout
from outrider.stores.export import export_store
from outrider.types import Attempt, CallState, Fidelity, Reward, RolloutState

ASK = {"model": "m", "messages": MESSAGES}


@pytest.fixture
def taken_over(gateway):
    """A rollout in its first attempt: that one's key, and what ends it and gives the key of the second."""
    store = gateway.store
    queued = make_rollout("r")
    store.add_rollouts([queued])

    def begin(number, expect):
        running = replace(queued, state=RolloutState.RUNNING, attempt=number)
        assert store.transition(running, expect=expect)
        store.put_attempt(Attempt(id=f"r.a{number}", rollout_id="r", number=number))
        return gateway.open(f"r.a{number}", allow_feedback=True)

    first = begin(1, (RolloutState.QUEUED, 0))

    def take_over():
        store.seal("r.a1")
        return begin(2, (RolloutState.RUNNING, 1))

    return first, take_over


@pytest.mark.parametrize("streamed", [False, True])
def test_R08_what_a_dead_attempt_had_under_way_is_kept_and_not_counted(engine, gateway, taken_over, tmp_path, streamed):
    first, take_over = taken_over
    gate = threading.Event()
    asked = {**ASK, "return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
    reply = Reply(asked=asked, chat=True, sampled=[Sampled()], prompt_ids=[1, 2, 3], id="late")
    whole = [b"", json.dumps(reply.body()).encode()]
    engine.answers.append(stream(*reply.chunks(), gate=gate) if streamed else Answer(chunks=whole, gate=gate))
    raw = gateway.open_socket(f"/s/{first}{CHAT}", ASK | {"stream": streamed})
    wait_for(lambda: engine.received)
    second = take_over()
    assert gateway.chat(second).status == 200
    gate.set()
    late_call = gateway.call("r.a1")
    raw.close()
    assert (late_call.state, late_call.fidelity) == (CallState.COMPLETE, Fidelity.EXACT)
    assert len(gateway.recorded(1, "r.a2")) == 1
    # A reward that comes late is kept with the dead attempt, and moves nothing.
    assert gateway.post(f"/s/{first}/feedback", {"value": 1}).status == 200
    gateway.store.add_reward(Reward(attempt_id="r.a1", value=1.0)).result(30)
    assert gateway.store.rewards("r.a2") == []
    assert gateway.store.rollout("r").attempt == 2
    export_store(gateway.store, tmp_path / "calls.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert {row["attempt_id"]: row["counted"] for row in rows} == {"r.a1": False, "r.a2": True}


def test_R08_a_dead_attempts_key_is_refused_in_every_protocol(engine, gateway, taken_over):
    first, take_over = taken_over
    take_over()
    url = f"{gateway.base_url}/s/{first}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k") as gpt:
        for ask in (
            lambda: gpt.chat.completions.create(**ASK),
            lambda: gpt.completions.create(model="m", prompt="Hi"),
            lambda: gpt.responses.create(model="m", input="Hi"),
            lambda: gpt.models.list(),
        ):
            with pytest.raises(openai.PermissionDeniedError, match="has ended"):
                ask()
    with anthropic.Anthropic(base_url=url, api_key="k") as claude:
        with pytest.raises(anthropic.PermissionDeniedError, match="has ended"):
            claude.messages.create(**ASK, max_tokens=9)
        with pytest.raises(anthropic.PermissionDeniedError, match="has ended"):
            claude.messages.count_tokens(**ASK)
    assert engine.received == []
    assert gateway.store.calls("r.a1") == []
    assert gateway.client.stats()["refused"] == {"attempt_ended": 6}
