"""The torch backend on a tiny random Llama, against plain transformers."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.backends import tree_attention
from outrider.backends.torch import TorchBackend
from outrider.errors import BatchError, ConfigError, RunError
from outrider.protocols import Backend, LossSpec
from outrider.types import Row

SPEC = LossSpec(clip_low=0.9, clip_high=5.0, kl_coef=0.1)


def backend(path, **options) -> TorchBackend:
    return TorchBackend(path, **({"precision": "float32", "threads": 1} | options))


def with_reference(rows):
    rng = np.random.default_rng(1)
    return [
        replace(row, reference_logprobs=-rng.uniform(4, 7, len(row.sample.token_ids)).astype(np.float32))
        for row in rows
    ]


def gradients(made: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in made._model.module.named_parameters() if p.grad is not None}


def by_transformers(path, rows: list[Row], spec: LossSpec):
    """Loss, gradients and log-probs from the model as it is, one row at a time, with the loss spelled out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = torch.zeros(())
    logprobs = []
    for row in rows:
        sample = row.sample
        ids = torch.tensor(sample.token_ids.tolist())
        logits = model(ids[None]).logits[0, :-1] / sample.temperature
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        logp = torch.cat([torch.zeros(1), logp])
        ratio = torch.exp(logp - torch.tensor(sample.logprobs))
        advantages, weights = torch.tensor(row.advantages), torch.tensor(row.weights)
        clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if spec.kl_coef:
            d = torch.tensor(row.reference_logprobs) - logp
            loss = loss + spec.kl_coef * (d.exp() - 1 - d)
        total = total + (weights * loss)[torch.tensor(sample.loss_mask)].sum()
        logprobs.append(np.where(sample.loss_mask, logp.detach().numpy(), 0))
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, logprobs


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [4096, 70])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_loss_gradient_and_logprobs_equal_transformers_row_by_row(tiny, share, budget, checkpointing, branching_rows):
    rows = with_reference(branching_rows(temperatures=(1.0, 0.7)))
    made = backend(tiny, share_prefixes=share, token_budget=budget, gradient_checkpointing=checkpointing)
    stats = made.forward_backward(rows, SPEC)
    loss, expected, logprobs = by_transformers(tiny, rows, SPEC)
    assert stats.loss == pytest.approx(loss, abs=1e-5)
    found = gradients(made)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * max(1.0, float(gradient.abs().max())))
    samples = [row.sample for row in rows]
    for one, other in zip(made.logprobs(samples), logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert stats.tokens == sum(int(sample.loss_mask.sum()) for sample in samples)
    lengths = sum(int(np.flatnonzero(sample.loss_mask)[-1]) for sample in samples)
    assert stats.tokens_computed < 0.8 * lengths if share else stats.tokens_computed == lengths


@pytest.mark.parametrize("share", [True, False])
def test_lora_with_checkpointing_has_the_gradient_of_lora_without(tiny, share, branching_rows):
    def after_a_step(checkpointing: bool) -> dict[str, torch.Tensor]:
        made = backend(tiny, lora_rank=4, gradient_checkpointing=checkpointing, share_prefixes=share)
        made.forward_backward(branching_rows(), LossSpec())
        made.optim_step(1e-2)  # now neither factor is 0
        made.forward_backward(branching_rows(1), LossSpec())
        return gradients(made)

    one, other = after_a_step(True), after_a_step(False)
    assert one.keys() == other.keys()
    assert all(".lora_" in name for name in one)
    assert all(float(gradient.abs().max()) > 0 for gradient in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-5, atol=1e-6)


SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
SHORT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHITECTURES = {
    "qwen3": (transformers.Qwen3Config, SMALL, ""),
    "qwen2 with biases": (transformers.Qwen2Config, SMALL, ""),
    "qwen3 with experts": (transformers.Qwen3MoeConfig, SMALL | MOE, ""),
    "mistral with a window": (transformers.MistralConfig, SMALL | {"sliding_window": 8}, ""),
    "gemma3 with a window in some layers": (
        transformers.Gemma3TextConfig,
        SMALL | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "",
    ),
    "deepseek with latent attention": (transformers.DeepseekV3Config, LATENT, ""),
    "gemma2 with capped scores": (
        transformers.Gemma2Config,
        SMALL | {"attn_logit_softcapping": 2.0},
        "its attention uses softcap",
    ),
    "cohere2 with scaled logits": (
        transformers.Cohere2Config,
        SMALL | {"sliding_window": 8, "logit_scale": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        "its logits are changed by logit_scale",
    ),
    "gpt-oss with sinks": (
        transformers.GptOssConfig,
        SMALL | SHORT_ROPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        "its attention uses s_aux",
    ),
    "qwen3-next with gated delta layers": (
        transformers.Qwen3NextConfig,
        SMALL | MOE | GATED_DELTA,
        "it has layers of kind linear_attention",
    ),
    "bloom with its own attention": (
        transformers.BloomConfig,
        {"vocab_size": 300, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "",
    ),
    "mamba": (transformers.MambaConfig, {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}, ""),
}
FALL_BACK = {"bloom with its own attention", "mamba"} | {name for name, (_, _, why) in ARCHITECTURES.items() if why}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_other_architectures_share_prefixes_or_say_that_they_cannot(tmp_path, recwarn, branching_rows, name):
    kind, changes, why = ARCHITECTURES[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(kind(**changes)).save_pretrained(tmp_path)
    recwarn.clear()
    rows = branching_rows(temperatures=(1.0, 0.7))
    made = backend(tmp_path, token_budget=150)
    said = [str(warning.message) for warning in recwarn if "trained row by row" in str(warning.message)]
    shares = name not in FALL_BACK
    assert len(said) == (not shares)
    assert all(why in message for message in said)
    recwarn.clear()
    spec = replace(SPEC, kl_coef=0.0)
    stats = made.forward_backward(rows, spec)
    assert (stats.tokens_computed < 300) == shares
    loss, expected, logprobs = by_transformers(tmp_path, rows, spec)
    assert stats.loss == pytest.approx(loss, abs=1e-4)
    for one, other in zip(made.logprobs([row.sample for row in rows]), logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for weight, gradient in gradients(made).items():
        wanted = expected[weight]
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4 * scale)


def test_a_model_that_falls_back_is_left_as_it_was(tiny, monkeypatch, branching_rows):
    def refuse(*arguments, **others):
        raise NotImplementedError("for this test")

    rows = branching_rows()
    expected = backend(tiny).forward_backward(rows, LossSpec())
    monkeypatch.setattr(tree_attention, "attend", refuse)
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot share prefixes \\(for this test\\)"):
        made = backend(tiny)
    assert not any("forward" in module.__dict__ for module in made._model.module.modules())
    stats = made.forward_backward(rows, LossSpec())
    assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
    assert stats.tokens_computed > expected.tokens_computed


def test_stats_by_hand(tiny, branching_rows):
    rows = branching_rows()
    made = backend(tiny)
    stats = made.forward_backward(rows, LossSpec())
    mask = np.concatenate([row.sample.loss_mask for row in rows])
    logp = np.concatenate(made.logprobs([row.sample for row in rows]))[mask]
    behaviour = np.concatenate([row.sample.logprobs for row in rows])[mask]
    difference = logp.astype(np.float64) - behaviour
    assert stats.ratio_mean == pytest.approx(np.exp(difference).mean(), rel=1e-4)
    assert stats.kl_behaviour == pytest.approx((np.exp(difference) - 1 - difference).mean(), rel=1e-4)
    assert stats.logprob_diff_mean == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert stats.logprob_diff_max == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert 0 < stats.entropy < math.log(300)
    assert stats.kl_reference == 0.0


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1000), order=st.permutations(range(9)), budget=st.integers(40, 400), share=st.booleans())
def test_order_of_rows_micro_batches_and_sharing_change_no_gradient(tiny, seed, order, budget, share, branching_rows):
    rows = branching_rows(seed)
    one = backend(tiny)
    one.forward_backward(rows, LossSpec())
    other = backend(tiny, share_prefixes=share, token_budget=budget)
    other.forward_backward([rows[index] for index in order[:4]], LossSpec())
    other.forward_backward([rows[index] for index in order[4:]], LossSpec())
    for gradient, expected in zip(gradients(other).values(), gradients(one).values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_splitting_a_rollout_into_rows_changes_no_gradient(tiny, branching_rows, make_row):
    row = branching_rows()[0]
    mask = row.sample.loss_mask
    first = np.arange(len(mask)) < 33
    parts = [
        make_row(row.sample.token_ids, np.flatnonzero(part), advantage=row.advantages[mask][0], weight=0.1)
        for part in (mask & first, mask & ~first)
    ]
    whole = make_row(row.sample.token_ids, np.flatnonzero(mask), advantage=row.advantages[mask][0], weight=0.1)
    one, other = backend(tiny), backend(tiny)
    one.forward_backward([whole], LossSpec())
    other.forward_backward(parts, LossSpec())
    for gradient, expected in zip(gradients(other).values(), gradients(one).values(), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_stays_near_float32_and_masters_take_small_steps(tiny, branching_rows):
    rows = branching_rows()
    exact, narrow = backend(tiny), backend(tiny, precision="bfloat16")
    expected = np.concatenate(exact.logprobs([row.sample for row in rows]))
    assert np.abs(np.concatenate(narrow.logprobs([row.sample for row in rows])) - expected).mean() < 0.05
    weight = narrow._model.module.model.layers[0].self_attn.q_proj.weight
    before = weight.detach().clone()
    # A step of 2e-5 is below what bfloat16 resolves of most of these weights; only a wider master adds them up.
    narrow.forward_backward(rows, LossSpec())
    narrow.optim_step(2e-5)
    assert (weight != before).float().mean() < 0.1
    for _ in range(60):
        narrow.forward_backward(rows, LossSpec())
        assert not narrow.optim_step(2e-5).skipped
    assert (weight != before).float().mean() > 0.4


@pytest.mark.parametrize(
    ("lora_rank", "precision"), [(0, "bfloat16"), (4, "bfloat16"), (0, "bfloat16-stochastic"), (0, "float32")]
)
def test_preferred_tokens_become_likelier(tiny, lora_rank, precision, make_row):
    good = make_row([1, 2, 3, 4, 5, 6], [3, 4, 5], advantage=1.0)
    bad = make_row([1, 2, 3, 7, 8, 9], [3, 4, 5], advantage=-1.0)
    made = backend(tiny, lora_rank=lora_rank, precision=precision)
    before = made.logprobs([good.sample, bad.sample])
    for _ in range(5):
        made.forward_backward([good, bad], LossSpec(name="reinforce"))
        made.optim_step(1e-3)
    after = made.logprobs([good.sample, bad.sample])
    assert after[0].sum() > before[0].sum() + 1
    assert after[1].sum() < before[1].sum() - 1


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_reference_is_the_starting_model(tiny, lora_rank, branching_rows):
    samples = [row.sample for row in branching_rows(temperatures=(1.0, 0.7))]  # the reference at a row's own, too
    made = backend(tiny, lora_rank=lora_rank)
    start = made.logprobs(samples)
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-2)
    now = made.logprobs(samples)
    assert made._reference is None  # who asks for no reference pays for none
    reference = made.logprobs(samples, reference=True)
    assert (made._reference is None) == (lora_rank > 0)  # with adapters it is the same weights without them
    np.testing.assert_allclose(np.concatenate(reference), np.concatenate(start), atol=1e-5)
    assert np.abs(np.concatenate(now) - np.concatenate(start)).max() > 0.01
    np.testing.assert_array_equal(np.concatenate(made.logprobs(samples)), np.concatenate(now))


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


def test_R10_without_a_gradient_nothing_moves(tiny, branching_rows, make_row):
    made = backend(tiny, weight_decay=0.5)
    rows = branching_rows()
    made.forward_backward(rows, LossSpec())
    assert not made.optim_step(1e-3).skipped
    before = [p.clone() for p in made._model.module.parameters()]
    stats = made.forward_backward([], LossSpec())
    assert (stats.loss, stats.tokens, stats.tokens_computed) == (0.0, 0, 0)
    masked = make_row([1, 2, 3], [])
    assert made.forward_backward([masked], LossSpec()).tokens == 0
    assert made.optim_step(1e-3).skipped  # momentum and decay would have moved them
    assert all(torch.equal(one, other) for one, other in zip(before, made._model.module.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_skipped(tiny, branching_rows, make_row):
    made = backend(tiny)
    row = make_row([1, 2, 3, 4], [2, 3], behaviour=-20.0, advantage=-3e38)  # its loss overflows
    made.forward_backward([row], LossSpec())
    before = [p.clone() for p in made._model.module.parameters()]
    stats = made.optim_step(1e-3)
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert all(torch.equal(one, other) for one, other in zip(before, made._model.module.parameters(), strict=True))
    made.forward_backward(branching_rows(), LossSpec())
    assert not made.optim_step(1e-3).skipped  # and nothing of it is left


def test_clipping_bounds_the_step(tiny, branching_rows):
    made = backend(tiny, max_grad_norm=1e-4, eps=1.0)  # with a large eps AdamW's step grows with the gradient
    made.forward_backward(branching_rows(), LossSpec())
    before = torch.cat([p.detach().flatten() for p in made._model.module.parameters()])
    stats = made.optim_step(1.0)
    after = torch.cat([p.detach().flatten() for p in made._model.module.parameters()])
    assert stats.grad_norm > 1
    assert float((after - before).norm()) < 2e-4


def test_bad_rows_are_refused(tiny, make_row):
    made = backend(tiny)
    row = make_row([1, 2, 3], [1, 2])
    for bad, message in (
        (replace(row, weights=row.weights[:-1]), "weights has length 2"),
        (replace(row, advantages=np.full(3, np.nan, np.float32)), "advantages holds"),
        (make_row([1, 2, 3], [0, 1]), "first token"),
        (make_row([1, 2, 3], [1], temperature=0.0), "temperature"),
    ):
        with pytest.raises(BatchError, match=message):
            made.forward_backward([bad], LossSpec())
    with pytest.raises(BatchError, match="kl_coef"):
        made.forward_backward([row], LossSpec(kl_coef=0.1))
    referenced = replace(row, reference_logprobs=np.zeros(3, np.float32))
    with pytest.raises(BatchError, match="some rows"):
        made.forward_backward([row, referenced], LossSpec())
    with pytest.raises(ConfigError, match=r"train\.loss.*ppo_clip"):
        made.forward_backward([row], LossSpec(name="nope"))
    with pytest.raises(BatchError, match="vocabulary"):
        made.forward_backward([make_row([1, 2, 300], [1])], LossSpec())


def test_a_precision_that_does_not_exist_is_a_clear_error(tiny):
    with pytest.raises(ConfigError, match=r"train\.precision.*float16.*Known: float32, bfloat16, bfloat16-stochastic"):
        backend(tiny, precision="float16")


def test_no_model_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path.*config\.json"):
        backend(tmp_path)


def test_it_is_a_backend(tiny):
    made: Backend = backend(tiny)
    assert made.logprobs([]) == []


def test_a_backend_that_nobody_needs_gives_its_memory_back(tiny, branching_rows):
    made = backend(tiny)
    made.forward_backward(branching_rows(), LossSpec())
    made.optim_step(1e-3)
    optimiser, model = weakref.ref(made._optimiser), weakref.ref(made._model.module)
    del made
    gc.collect()
    assert (optimiser(), model()) == (None, None)
