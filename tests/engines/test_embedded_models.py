"""Families of models: each must compute what transformers computes, whichever of the two ways it takes."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from outrider.engines.embedded.generic import GenericModel
from outrider.engines.embedded.llama import LlamaModel
from outrider.engines.embedded.model import load_model
from outrider.engines.embedded.server import EngineOptions, build
from outrider.errors import ConfigError

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {
    "llama-untied": (LlamaConfig(**GROUPED, tie_word_embeddings=False), LlamaModel),
    "llama-biased": (LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True), LlamaModel),
    "llama3-rope": (LlamaConfig(**GROUPED, rope_parameters=LLAMA3_ROPE), LlamaModel),
    "mistral": (MistralConfig(**GROUPED, sliding_window=None, head_dim=32), LlamaModel),
    "qwen2": (Qwen2Config(**GROUPED), LlamaModel),
    "qwen3": (Qwen3Config(**GROUPED, head_dim=16), LlamaModel),
    "qwen3-moe": (Qwen3MoeConfig(**GROUPED, **MOE), GenericModel),
    "gpt-neox": (GPTNeoXConfig(**SIZES), GenericModel),
    "dynamic-rope": (
        LlamaConfig(**GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        GenericModel,
    ),
}


@pytest.fixture
def folder(tmp_path, write_tokenizer, write_model):
    def write(config, seed=0):
        target = tmp_path / f"model-{seed}"
        target.mkdir()
        write_tokenizer(target)
        torch.manual_seed(100 + seed)
        return write_model(target, config, seed)

    return write


def generate(folder, prompt, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(folder, start_engine, name):
    config, kind = FAMILIES[name]
    path = folder(config)
    assert type(load_model(path, "float32", 256)) is kind
    engine = start_engine(model=str(path))
    source = random.Random(0)
    prompts = [[source.randrange(300) for _ in range(length)] for length in (3, 40, 70)]
    bodies = engine.complete([*prompts, prompts[1] + [5]], temperature=0, max_tokens=12, ignore_eos=True)["choices"]
    for prompt, choice in zip([*prompts, prompts[1] + [5]], bodies, strict=True):
        assert choice["token_ids"] == generate(path, prompt, 12)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-neox", "qwen2"])
def test_weights_are_exchanged_whichever_way_it_runs(folder, start_engine, name):
    config, _ = FAMILIES[name]
    one, two = folder(config), folder(config, seed=1)
    engine = start_engine(model=str(one))
    ask = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    engine.control.load_weights(two, 1)
    assert engine.complete(**ask)["choices"][0]["token_ids"] == generate(two, [1, 2, 3], 12)
    engine.control.load_weights(one, 2)
    assert engine.complete(**ask)["choices"][0]["token_ids"] == generate(one, [1, 2, 3], 12)


def test_attention_that_is_not_the_ordinary_one_is_refused(folder):
    path = folder(Gemma2Config(**GROUPED, head_dim=16, query_pre_attn_scalar=16))
    with pytest.raises(ConfigError, match="softcap"):
        build(EngineOptions(model=str(path), dtype="float32", max_model_len=64))


def test_a_window_that_would_matter_is_refused(folder):
    path = folder(MistralConfig(**GROUPED, sliding_window=32))
    with pytest.raises(ConfigError, match="sliding_window"):
        build(EngineOptions(model=str(path), dtype="float32", max_model_len=64))


def test_a_model_for_fewer_positions_sets_the_limit(folder):
    path = folder(LlamaConfig(**GROUPED))
    _, _, length = build(EngineOptions(model=str(path), dtype="float32", max_model_len=100_000))
    assert length == 256


def test_a_model_type_that_nobody_knows_is_a_configuration_error(folder):
    path = folder(LlamaConfig(**GROUPED))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ConfigError, match="nonesuch"):
        build(EngineOptions(model=str(path)))


def test_bfloat16_stays_near_float32(folder, start_engine):
    path = folder(LlamaConfig(**GROUPED))
    exact, rough = start_engine(model=str(path)), start_engine(model=str(path), dtype="bfloat16")
    ask = {"prompt": list(range(50)), "max_tokens": 1, "logprobs": 20, "seed": 1}
    a, b = (e.complete(**ask)["choices"][0]["logprobs"]["top_logprobs"][0] for e in (exact, rough))
    both = set(a) & set(b)
    assert len(both) >= 10
    assert max(abs(a[token] - b[token]) for token in both) < 0.5
