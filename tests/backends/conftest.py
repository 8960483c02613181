"""A tiny random Llama, and rows for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outrider.types import Row, Sample

sys.path.insert(0, str(Path(__file__).parent))  # for row_by_row, which several tests here share

VOCABULARY = 300


def save_tiny_llama(folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    } | changes
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).to(dtype).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_row(
    ids, trained, *, rollout="r", advantage=1.0, weight=0.1, temperature=1.0, behaviour=-1.0, reference=None
) -> Row:
    """`trained` lists the positions with mask true."""
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[list(trained)] = True
    sample = Sample(
        rollout_id=rollout,
        group_id="g",
        attempt_id="a",
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, behaviour, 0).astype(np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        call_index=np.zeros(len(ids), dtype=np.int32),
        temperature=temperature,
    )
    return Row(
        sample=sample,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights=np.where(mask, weight, 0).astype(np.float32),
        reference_logprobs=reference,
    )


def branching_rows(seed: int = 0, temperatures=(1.0,)) -> list[Row]:
    """Two groups of rollouts with common prompts; some rollouts sampled the same first tokens, two are identical."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, 20)
    rows = []
    for group in range(2):
        prompt = np.concatenate([system, rng.integers(0, VOCABULARY, 10)])
        opening = rng.integers(0, VOCABULARY, 4)
        for member in range(4):
            tail = rng.integers(0, VOCABULARY, int(rng.integers(5, 12)))
            answer = np.concatenate([opening, tail]) if member % 2 else tail
            context = rng.integers(0, VOCABULARY, 6)
            second = rng.integers(0, VOCABULARY, 5)
            ids = np.concatenate([prompt, answer, context, second])
            trained = [*range(30, 30 + len(answer)), *range(len(ids) - 5, len(ids))]
            rows.append(
                make_row(
                    ids,
                    trained,
                    rollout=f"r{group}-{member}",
                    advantage=float(rng.normal()),
                    weight=1 / (8 * len(trained)),
                    temperature=temperatures[member % len(temperatures)],
                    behaviour=float(-rng.uniform(4, 7)),
                )
            )
    twin = rows[1]
    rows.append(
        make_row(
            twin.sample.token_ids, np.flatnonzero(twin.sample.loss_mask), rollout="twin", advantage=-0.7, weight=0.02
        )
    )
    return rows


@pytest.fixture(scope="session", name="make_row")
def make_row_fixture():
    return make_row


@pytest.fixture(scope="session", name="branching_rows")
def branching_rows_fixture():
    return branching_rows


@pytest.fixture(scope="session", name="save_tiny_llama")
def save_tiny_llama_fixture():
    return save_tiny_llama
