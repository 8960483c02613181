"""The two ways a model is run, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import Batch
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cache and a scheduler must know of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int


class Model(Protocol):
    """A model that runs flat batches."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """Logits float32 (rows, vocabulary) of the tokens that `batch` names in `rows`; may be overwritten."""

    def read(self, folder: Path) -> object:
        """Load and check weights, from any thread, changing nothing. Raises `ConfigError`."""

    def swap(self, weights: object) -> None:
        """Serve what `read` returned. Called between steps; cannot fail halfway."""


def load_model(folder: Path, dtype: str, max_model_len: int) -> Model:
    """Load the model in `folder`. Raises `ConfigError`.

    Llama-like models run through our own forward pass, which takes about half the time; the rest through transformers'
    modules with our attention in them.
    """
    from outrider.engines.embedded import generic, llama

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = torch.float32 if dtype == "float32" else torch.bfloat16
    try:
        config: Any = AutoConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model: the config in {str(folder)!r} cannot be used: {error}") from error
    window = _window(config)
    if window is not None and window < max_model_len:
        raise ConfigError(
            f"model: its attention has a sliding_window of {window} tokens, which this engine does not compute. "
            f"Set engine.max_model_len to at most {window}."
        )
    if llama.supports(config, folder):
        return llama.LlamaModel(config, folder, compute, device)
    return generic.GenericModel(config, folder, compute, device)


def _window(config: Any) -> int | None:
    """The sliding window of some layer's attention, where it has one."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    layers = getattr(text, "layer_types", None)
    if window is None or not getattr(text, "use_sliding_window", True):
        return None
    return int(window) if layers is None or "sliding_attention" in layers else None
