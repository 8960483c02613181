"""Any causal language model of transformers with ordinary attention, run over flat batches.

The model sees one sequence of N tokens with their positions. Attention, the only place where tokens meet, is ours: it
knows which token belongs to which sequence. Models that want more of it (soft-capped scores, sinks, a sliding window
that would matter) are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import Batch
from outrider.engines.embedded.checkpoint import check_tensors, read_tensors
from outrider.engines.embedded.model import Shape
from outrider.errors import ConfigError

REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which models ask for attention that is not the ordinary one."""


class GenericModel:
    """A `Model`. `forward` and `swap` belong to one thread; `read` may be called from any."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        name = f"outrider-{id(self)}"  # transformers looks attention up by name; each model needs its own batch
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _no_mask)
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, attn_implementation=name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(f"model: {str(folder)!r} cannot be loaded: {error}") from error
        self._model.to(device).eval()
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        self.shape = Shape(
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=dim,
            vocabulary=int(text.vocab_size),
            max_positions=int(text.max_position_embeddings),
        )
        self._batch: Batch | None = None
        self._attention: Attention | None = None

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        self._batch, self._attention = batch, attention
        logits: Tensor = self._model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.rows,
        ).logits
        return logits[0].float()

    def read(self, folder: Path) -> dict[str, Tensor]:
        tensors = read_tensors(folder)
        own = self._model.state_dict()
        tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
        expected = {name: t.shape for name, t in own.items() if name not in tied}
        found = {name: t for name, t in tensors.items() if name not in tied}
        check_tensors(found, expected, folder)
        return found

    def swap(self, weights: object) -> None:
        assert isinstance(weights, dict)
        own = self._model.state_dict()
        for name, tensor in weights.items():
            own[name].copy_(tensor)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Called by the model's layers with (1, head, N, dim); returns (1, N, head, dim)."""
        refused = [name for name in REFUSED if options.get(name) is not None]
        window = options.get("sliding_window")
        assert self._batch is not None
        assert self._attention is not None
        if window is not None and any(span.length > window for span in self._batch.spans):
            refused.append(f"sliding_window={window}")
        if refused:
            raise ConfigError(f"model: its attention needs {', '.join(refused)}, which this engine does not compute.")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        out = self._attention(module.layer_idx, self._batch, q, k, v, options.get("scaling") or q.shape[-1] ** -0.5)
        return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are the spans' own affair."""
