"""Which architectures share prefixes, and what becomes of the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from row_by_row import SPEC, backend, by_transformers, gradients

from outrider.backends import tree_attention
from outrider.protocols import LossSpec

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
        "its attention cannot be replaced",
    ),
    "mamba": (
        transformers.MambaConfig,
        {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2},
        "it has layers of kind",
    ),
}
"""Configuration, its changes, and why the model can't share prefixes, or an empty string."""


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_other_architectures_share_prefixes_or_say_that_they_cannot(tmp_path, recwarn, branching_rows, name):
    kind, changes, why = ARCHITECTURES[name]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(kind(**changes)).save_pretrained(tmp_path)
    recwarn.clear()
    rows = branching_rows(temperatures=(1.0, 0.7))
    made = backend(tmp_path, token_budget=150)
    said = [str(warning.message) for warning in recwarn if "trained row by row" in str(warning.message)]
    shares = not why
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
