"""Real harnesses and the real 135M model, under exact continuation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakes.gateway import RunningGateway
from fakes.real_engine import MODEL, RealEngine
from harnesses.bench import outcome_of
from harnesses.catalog import HARNESSES, Dialect, Harness, Variant
from harnesses.drive import Ran, drive
from harnesses.install import install
from outrider import trajectory
from outrider.engines.embedded.weights import resolve_model
from outrider.types import Call, CallState, Fidelity, Json

pytestmark = [pytest.mark.model, pytest.mark.harness]

END, ASK = "<|im_end|>", "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(MODEL)


@pytest.fixture(scope="module")
def encode(folder):
    """Text to ids by another way than the gateway's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def gateway(folder, tmp_path_factory) -> Iterator[RunningGateway]:
    store = tmp_path_factory.mktemp("store") / "store.sqlite3"
    options = {"mode": "train", "model": "policy", "tokens": "gateway", "tokenizer": str(folder)}
    with RealEngine(folder, max_model_len=8192) as engine, RunningGateway(engine, store, **options) as gateway:
        yield gateway


def harness_called(name: str) -> Harness:
    return next(harness for harness in HARNESSES if harness.name == name)


def run(gateway: RunningGateway, key: str, harness: Harness, variant: Variant, work: Path) -> Ran:
    ran = drive(harness, variant, install(harness), url=f"{gateway.base_url}/s/{key}", work=work)
    assert ran.exit_code == 0, ran.output
    return ran


def turn(message: Json) -> str:
    """One message in SmolLM2's format."""
    return f"<|im_start|>{message['role']}\n{message['content']}{END}\n"


def check(calls: Sequence[Call], new: Sequence[Sequence[Json]], encode) -> None:
    """Each call adds up, and each prompt is the last one, what was sampled after it, and the `new` messages' ids."""
    for call in calls:
        assert (call.state, call.fidelity) == (CallState.COMPLETE, Fidelity.EXACT), call.fidelity_reason
        (choice,) = call.choices
        assert call.usage is not None
        assert call.prompt_ids is not None
        assert call.usage.prompt_tokens == len(call.prompt_ids)
        assert call.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs) > 0
        assert np.isfinite(choice.logprobs).all()
    assert [outcome_of(call)[0] for call in calls] == ["opened", *["continued"] * (len(calls) - 1)]
    for last, call, messages in zip(calls[:-1], calls[1:], new, strict=True):
        sampled = last.choices[0].token_ids.tolist()
        end = "" if sampled[-1] == encode(END)[0] else END  # an answer that was cut by its limit
        said = encode(end + "\n" + "".join(map(turn, messages)) + ASK)
        assert call.prompt_ids.tolist() == [*last.prompt_ids.tolist(), *sampled, *said]


def new_messages(call: Call) -> list[Json]:
    """What a chat request says after the last answer."""
    messages = json.loads(call.request)["messages"]
    last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
    return messages[last + 1 :]


def talk(gateway: RunningGateway, attempt_id: str, work: Path, temperature: float) -> tuple[Ran, list[Call]]:
    harness = harness_called("openai-agents")
    command = ("$python", "$programs/openai_agents_talk.py")
    key = gateway.open(attempt_id, sampling={"temperature": temperature})
    ran = run(gateway, key, harness, Variant(dialect=Dialect.CHAT, streamed=False, command=command), work)
    return ran, gateway.store.calls(attempt_id)


def test_the_agents_sdk_uses_its_tool_with_the_real_model(gateway, tmp_path, encode):
    ran, calls = talk(gateway, "greedy", tmp_path, 0.0)
    check(calls, [new_messages(call) for call in calls[1:]], encode)
    results = [message for call in calls[1:] for message in new_messages(call) if message["role"] == "tool"]
    assert results, ran.output  # it follows the examples and calls the tool
    assert len(calls) == 3 + len(results)


def test_recorded_log_probs_are_the_models_own(gateway, tmp_path, encode, folder):
    """The row of a sampled conversation, computed again in one pass by another implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    _, calls = talk(gateway, "sampled", tmp_path, 1.0)
    check(calls, [new_messages(call) for call in calls[1:]], encode)
    (row,) = trajectory.build(calls).samples(rollout_id="r", group_id="g").samples
    assert row.loss_mask.sum() == sum(len(call.choices[0].token_ids) for call in calls)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(row.token_ids[None].astype(np.int64))
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].log_softmax(-1)
    found = scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
    apart = np.abs(found - row.logprobs[1:])[row.loss_mask[1:]]
    # The engine computes in bfloat16. Beside the wrong token the difference would be several.
    assert apart.mean() < 0.06
    assert apart.max() < 1.0


@pytest.mark.parametrize("streamed", [False, True])
def test_smolagents_forces_calls_that_the_real_model_does_not_make(gateway, tmp_path, encode, streamed):
    """It tells the model so, in a message of the user's, and tries again: a policy failure that is trained on."""
    program = ("$python", "$programs/smolagents_agent.py", "chat", "streamed" if streamed else "plain", "short")
    key = gateway.open(f"forced {streamed}", sampling={"temperature": 0.0, "max_tokens": 48})
    variant = Variant(dialect=Dialect.CHAT, streamed=streamed, command=program)
    run(gateway, key, harness_called("smolagents"), variant, tmp_path)
    *steps, last = gateway.store.calls(f"forced {streamed}")
    assert len(steps) == 4
    assert {outcome_of(call)[1] for call in steps} == {"a forced tool call, left free and not made"}
    assert last.continuation == "broke: system prompt changed"  # it gives up, and asks for an answer in another way
    said = [[{**one, "content": one["content"][0]["text"]} for one in new_messages(call)] for call in steps[1:]]
    assert all("Error while parsing tool call" in told[-1]["content"] for told in said)
    check(steps, said, encode)


@pytest.mark.slow
def test_codex_goes_on_with_its_session_in_another_process(gateway, tmp_path, encode):
    """Three starts of the CLI, one conversation: the prompts are 4,500 tokens long, and only the questions are new."""
    harness = harness_called("codex")
    (variant,) = (one for one in harness.variants if "config.toml" in one.label)
    *options, _ = variant.command
    key = gateway.open("codex", sampling={"temperature": 0.0, "max_tokens": 24})
    questions = ["What is the capital of France?", "And of Italy?", "Which is larger?"]
    for number, question in enumerate(questions):
        resume = ("resume", "--last") if number else ()
        run(gateway, key, harness, replace(variant, command=(*options, *resume, question)), tmp_path)
    calls = gateway.store.calls("codex")
    check(calls, [[{"role": "user", "content": question}] for question in questions[1:]], encode)
    assert {call.dialect for call in calls} == {"openai_responses"}
    assert all(call.streamed for call in calls)
