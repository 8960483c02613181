"""What the torch backend publishes, saves and loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from row_by_row import backend

from outrider.backends.torch import TorchBackend
from outrider.errors import RunError
from outrider.protocols import LossSpec


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_published_weights_load_in_transformers_and_agree(tiny, tmp_path, lora_rank, branching_rows):
    made = backend(tiny, lora_rank=lora_rank)
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-2)
    samples = [row.sample for row in branching_rows()]
    before = made.logprobs(samples)
    folder = made.publish(tmp_path / "weights" / "v0001")
    assert folder == tmp_path / "weights" / "v0001"
    assert [path.name for path in folder.parent.iterdir()] == ["v0001"]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    again = backend(folder)
    difference = np.concatenate(again.logprobs(samples)) - np.concatenate(before)
    assert np.abs(difference).mean() < 0.05  # weights were rounded to bfloat16
    np.testing.assert_array_equal(np.concatenate(made.logprobs(samples)), np.concatenate(before))
    made.publish(folder)  # a second time, over the first
    assert [path.name for path in folder.parent.iterdir()] == ["v0001"]


@pytest.mark.parametrize(
    ("lora_rank", "precision"), [(0, "bfloat16"), (0, "float32"), (4, "bfloat16"), (0, "bfloat16-stochastic")]
)
def test_resume_takes_the_same_next_step_to_the_bit(tiny, tmp_path, lora_rank, precision, branching_rows):
    def step(made: TorchBackend, seed: int):
        stats = made.forward_backward(branching_rows(seed), LossSpec())
        return stats, made.optim_step(1e-3)

    def weights(made: TorchBackend):
        return {name: p.detach().clone() for name, p in made._model.module.named_parameters()}

    first = backend(tiny, lora_rank=lora_rank, precision=precision, weight_decay=0.1)
    step(first, 0)
    step(first, 1)
    first.save(tmp_path / "checkpoint")
    expected = step(first, 2), step(first, 3), weights(first)

    second = backend(tiny, lora_rank=lora_rank, precision=precision, weight_decay=0.1, seed=5)
    step(second, 7)
    second.forward_backward(branching_rows(8), LossSpec())  # a gradient that a load forgets
    second.load(tmp_path / "checkpoint")
    assert (step(second, 2), step(second, 3)) == expected[:2]
    for name, tensor in weights(second).items():
        assert torch.equal(tensor, expected[2][name]), name


def test_save_before_the_first_step_and_over_an_older_checkpoint(tiny, tmp_path, branching_rows):
    made = backend(tiny)
    made.save(tmp_path / "c")
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-2)
    moved = made.logprobs([branching_rows()[0].sample])
    made.load(tmp_path / "c")
    assert np.abs(made.logprobs([branching_rows()[0].sample])[0] - moved[0]).max() > 0
    made.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-stochastic"])
def test_what_is_published_is_bit_for_bit_what_was_computed_with(tiny, tmp_path, precision, branching_rows):
    made = backend(tiny, precision=precision)
    for seed in range(3):
        made.forward_backward(branching_rows(seed), LossSpec())
        made.optim_step(1e-3)
    again = transformers.AutoModelForCausalLM.from_pretrained(made.publish(tmp_path / "v1"))
    for name, parameter in made._model.module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_checkpoints_that_do_not_fit_are_refused(tiny, tmp_path, save_tiny_llama):
    made = backend(tiny)
    made.save(tmp_path / "c")
    with pytest.raises(RunError, match="no whole checkpoint"):
        made.load(tmp_path / "missing")
    with pytest.raises(RunError, match="another model or of other LoRA settings"):
        backend(tiny, lora_rank=2).load(tmp_path / "c")
    with pytest.raises(RunError, match=r"another train\.precision: it holds float32, this run bfloat16"):
        backend(tiny, precision="bfloat16-stochastic").load(tmp_path / "c")
    other = save_tiny_llama(tmp_path / "wider", intermediate_size=128)
    with pytest.raises(RunError, match="has shape"):
        backend(other).load(tmp_path / "c")
    weights = tmp_path / "c" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(RunError, match="no whole checkpoint"):
        made.load(tmp_path / "c")
