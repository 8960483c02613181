"""The critic of the torch backend, against plain transformers and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import safetensors
import torch
import transformers

from outrider.backends.torch import TorchBackend
from outrider.errors import BatchError, ConfigError, RunError
from outrider.protocols import LossSpec
from outrider.types import Row

SPEC = LossSpec(name="reinforce", value_coef=0.7, value_clip=0.3)


def backend(path, **options) -> TorchBackend:
    return TorchBackend(path, **({"precision": "float32", "threads": 1, "value_head": "shared"} | options))


def set_head(made: TorchBackend, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the head weights that are not 0; returns copies."""
    head = made._model.value_head
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) / 8)
        head.bias.fill_(0.2)
    return head.weight.detach().float().clone(), head.bias.detach().float().clone()


def with_returns(rows: list[Row], old: bool = True) -> list[Row]:
    rng = np.random.default_rng(2)

    def draw(row: Row) -> np.ndarray:
        return np.where(row.sample.loss_mask, rng.normal(size=len(row.sample.token_ids)), 0).astype(np.float32)

    return [replace(row, returns=draw(row), old_values=draw(row) if old else None) for row in rows]


def gradients(made: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made._optimiser._views["gradient"].items()}


def naive(path, rows: list[Row], spec: LossSpec, weight: torch.Tensor, bias: torch.Tensor):
    """Loss, gradients and values with autograd, one row at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    total = torch.zeros(())
    found = []
    for row in rows:
        sample = row.sample
        ids = torch.tensor(sample.token_ids.tolist())
        out = model(ids[None], output_hidden_states=True)
        mask = torch.tensor(sample.loss_mask)[1:]
        logp = torch.log_softmax(out.logits[0, :-1] / sample.temperature, -1).gather(1, ids[1:, None])[:, 0]
        value = out.hidden_states[-1][0, :-1] @ weight + bias  # the state before token t is read at t - 1
        returns, old = torch.tensor(row.returns)[1:], torch.tensor(row.old_values)[1:]
        near = torch.minimum(torch.maximum(value, old - spec.value_clip), old + spec.value_clip)
        critic = torch.maximum((value - returns) ** 2, (near - returns) ** 2) / 2
        loss = -torch.tensor(row.advantages)[1:] * logp + spec.value_coef * critic
        total = total + (torch.tensor(row.weights)[1:] * loss)[mask].sum()
        found.append(np.concatenate([[0], np.where(sample.loss_mask[1:], value.detach().numpy(), 0)]))
    total.backward()
    trunk = {name: parameter.grad for name, parameter in model.named_parameters()}
    return total.item(), trunk | {"value_head.weight": weight.grad, "value_head.bias": bias.grad}, found


@pytest.mark.parametrize(("share", "budget"), [(True, 4096), (True, 70), (False, 4096)])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_loss_gradient_and_values_equal_a_naive_critic(tiny, share, budget, checkpointing, branching_rows):
    rows = with_returns(branching_rows(temperatures=(1.0, 0.7)))
    made = backend(tiny, share_prefixes=share, token_budget=budget, gradient_checkpointing=checkpointing)
    loss, expected, values = naive(tiny, rows, SPEC, *set_head(made))
    for one, other in zip(made.values([row.sample for row in rows]), values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert made.forward_backward(rows, SPEC).loss == pytest.approx(loss, abs=1e-5)
    found = gradients(made)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, float(gradient.abs().max())))


def test_a_model_that_cannot_share_prefixes_has_a_critic_too(tmp_path, branching_rows):
    settings = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "attn_logit_softcapping": 2.0,
    }
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="row by row"):
        made = backend(tmp_path)
    rows = with_returns(branching_rows())
    loss, expected, values = naive(tmp_path, rows, SPEC, *set_head(made))
    for one, other in zip(made.values([row.sample for row in rows]), values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert made.forward_backward(rows, SPEC).loss == pytest.approx(loss, abs=1e-4)
    for name, gradient in gradients(made).items():
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4 * scale)


def test_it_begins_at_zero_and_rows_without_returns_need_none(tiny, branching_rows):
    rows = branching_rows()
    made, without = backend(tiny), backend(tiny, value_head="none")
    assert all((values == 0).all() for values in made.values([row.sample for row in rows]))
    assert made.forward_backward(rows, SPEC) == without.forward_backward(rows, SPEC)
    with pytest.raises(ConfigError, match="without a value head"):
        without.values([rows[0].sample])
    with pytest.raises(BatchError, match="returns, but the backend was made without a value head"):
        without.forward_backward(with_returns(rows), SPEC)
    with pytest.raises(BatchError, match="old_values but no returns"):
        made.forward_backward([replace(rows[0], old_values=rows[0].advantages)], SPEC)
    with pytest.raises(ConfigError, match=r"train\.critic.*'yes'.*shared"):
        backend(tiny, value_head="yes")


def test_a_detached_critic_leaves_the_trunk_to_the_policy(tiny, branching_rows):
    rows = with_returns(branching_rows())
    detached, shared, without = backend(tiny, value_head="detached"), backend(tiny), backend(tiny, value_head="none")
    for made in (detached, shared):
        set_head(made)
        made.forward_backward(rows, SPEC)
    without.forward_backward([replace(row, returns=None, old_values=None) for row in rows], SPEC)
    one, two = gradients(detached), gradients(shared)
    for name, gradient in gradients(without).items():
        torch.testing.assert_close(one[name], gradient, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(two["model.norm.weight"], one["model.norm.weight"], atol=1e-4)
    torch.testing.assert_close(one["value_head.weight"], two["value_head.weight"])


def test_statistics_by_hand(tiny, branching_rows):
    rows = with_returns(branching_rows(), old=False)
    made = backend(tiny)
    set_head(made)
    mask = np.concatenate([row.sample.loss_mask for row in rows])
    values = np.concatenate(made.values([row.sample for row in rows]))[mask].astype(np.float64)
    returns = np.concatenate([row.returns for row in rows])[mask].astype(np.float64)
    stats = made.forward_backward(rows, SPEC)
    assert stats.value_loss == pytest.approx(((values - returns) ** 2).mean() / 2, rel=1e-4)
    explained = 1 - (returns - values).var() / returns.var()
    assert stats.value_explained_variance == pytest.approx(explained, rel=1e-3)
    alike = [replace(row, returns=np.where(row.sample.loss_mask, 0.5, 0).astype(np.float32)) for row in rows]
    assert made.forward_backward(alike, SPEC).value_explained_variance == 0.0


@pytest.mark.parametrize("ratio", [1.0, 20.0])
def test_the_head_has_a_learning_rate_of_its_own(tiny, ratio, branching_rows):
    made = backend(tiny, value_lr_ratio=ratio)
    weight, _ = set_head(made)
    trunk = made._model.module.model.norm.weight.detach().clone()
    made.forward_backward(with_returns(branching_rows()), SPEC)
    made.optim_step(1e-4)
    # AdamW's first step is the learning rate for every weight.
    assert float((made._model.value_head.weight.detach() - weight).abs().max()) == pytest.approx(1e-4 * ratio, rel=1e-2)
    assert float((made._model.module.model.norm.weight.detach() - trunk).abs().max()) == pytest.approx(1e-4, rel=1e-2)


def test_the_head_is_clipped_apart_so_that_a_bad_critic_does_not_slow_the_policy(tiny, branching_rows):
    rows = [replace(row, returns=row.returns * 1e4) for row in with_returns(branching_rows(), old=False)]
    made, without = backend(tiny, value_head="detached"), backend(tiny, value_head="none")
    made.forward_backward(rows, SPEC)
    without.forward_backward([replace(row, returns=None) for row in rows], SPEC)
    assert float(gradients(made)["value_head.weight"].norm()) > 100
    assert made.optim_step(1e-3).grad_norm == pytest.approx(without.optim_step(1e-3).grad_norm, rel=1e-4)
    samples = [row.sample for row in rows]
    one, other = np.concatenate(made.logprobs(samples)), np.concatenate(without.logprobs(samples))
    np.testing.assert_allclose(one, other, atol=1e-3)


def test_a_critic_whose_gradient_is_not_finite_moves_nothing(tiny, branching_rows):
    made = backend(tiny, value_head="detached")
    rows = [replace(row, returns=row.returns * 3e37) for row in with_returns(branching_rows(), old=False)]
    made.forward_backward(rows, replace(SPEC, value_coef=1e30))
    before = [parameter.clone() for parameter in made._model.module.parameters()]
    stats = made.optim_step(1e-3)
    assert stats.skipped
    assert math.isfinite(stats.grad_norm)  # the policy's own
    assert all(torch.equal(one, two) for one, two in zip(before, made._model.module.parameters(), strict=True))


@pytest.mark.parametrize(("lora_rank", "precision"), [(0, "bfloat16"), (4, "bfloat16"), (0, "bfloat16-stochastic")])
def test_resume_with_a_critic_takes_the_same_next_step_to_the_bit(tiny, tmp_path, lora_rank, precision, branching_rows):
    options = {"lora_rank": lora_rank, "precision": precision, "value_lr_ratio": 10.0}

    def step(made: TorchBackend, seed: int):
        stats = made.forward_backward(with_returns(branching_rows(seed), old=False), SPEC)
        return stats, made.optim_step(1e-3), made.values([row.sample for row in branching_rows(seed)])[0].tolist()

    first = backend(tiny, **options)
    step(first, 0)
    step(first, 1)
    first.save(tmp_path / "checkpoint")
    expected = step(first, 2), step(first, 3)
    assert any(expected[1][2])
    second = backend(tiny, **options)
    step(second, 7)
    second.load(tmp_path / "checkpoint")
    assert (step(second, 2), step(second, 3)) == expected
    with pytest.raises(RunError, match="with or without a critic: value_head"):
        backend(tiny, value_head="none", **options).load(tmp_path / "checkpoint")


def test_it_is_not_published(tiny, tmp_path, branching_rows):
    made = backend(tiny)
    made.forward_backward(with_returns(branching_rows()), SPEC)
    made.optim_step(1e-3)
    folder = made.publish(tmp_path / "v1")
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert not any("value" in name and "v_proj" not in name for name in names)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]


@pytest.mark.parametrize("value_head", ["shared", "detached"])
def test_it_learns_what_states_are_worth(tiny, value_head, branching_rows):
    rows = [
        replace(
            row,
            advantages=np.zeros_like(row.advantages),
            weights=np.where(row.sample.loss_mask, 1 / (9 * row.sample.loss_mask.sum()), 0).astype(np.float32),
            returns=np.where(row.sample.loss_mask, float(index % 2), 0).astype(np.float32),
        )
        for index, row in enumerate(branching_rows())
    ]
    made = backend(tiny, value_head=value_head, value_lr_ratio=100.0)
    stats = []
    for _ in range(30):
        stats.append(made.forward_backward(rows, LossSpec()))
        made.optim_step(1e-4)
    assert stats[0].value_loss > 0.2
    assert stats[-1].value_loss < stats[0].value_loss / 2
    assert stats[-1].value_explained_variance > 0.2
