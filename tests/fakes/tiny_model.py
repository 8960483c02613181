"""A tiny random Llama with a byte-level tokenizer: real weights and a real template, in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "a stitch in time saves nine", "HAVING HAVING ING HAV"] * 3


def save_tokenizer(folder: Path, template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, some merges, three special tokens and one added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    return wrapped


def save_model(folder: Path, config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder


def tiny_config(vocabulary: int, **changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # wide, so that the next token is far from uniform
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**values, **changes})


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """Model and tokenizer in one folder."""
    tokenizer = save_tokenizer(folder)
    return save_model(folder, tiny_config(len(tokenizer) + 4), seed)  # padded, as real vocabularies are
