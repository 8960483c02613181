"""Any causal language model of transformers with ordinary attention, run over flat batches.

The model sees one sequence of N tokens with their positions. Attention, the only place where tokens meet, is ours: it
knows which token belongs to which sequence. Models that want more of it (soft-capped scores, sinks) are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import Batch
from outrider.engines.embedded.checkpoint import check_finite
from outrider.engines.embedded.model import Shape
from outrider.errors import ConfigError

REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which models ask for attention that is not the ordinary one."""


class GenericModel:
    """A `Model`. `forward` and `swap` belong to one thread; `read` may be called from any."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._config = config
        self._name = f"outrider-{id(self)}"  # transformers looks attention up by name; each model needs its own batch
        ALL_ATTENTION_FUNCTIONS.register(self._name, self._attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(self._name, _no_mask)
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        self.shape = Shape(
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            vocabulary=int(text.vocab_size),
            max_positions=int(text.max_position_embeddings),
        )
        self._model = self.read(folder)
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

    def read(self, folder: Path) -> Any:
        """A second instance of the model, with the weights in `folder`: transformers renames and merges as it loads."""
        if not folder.is_dir():
            raise ConfigError(f"path: there is no folder {str(folder)!r}.")
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=self._config,
                dtype=self.dtype,
                attn_implementation=self._name,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise ConfigError(f"path: the weights in {str(folder)!r} cannot be loaded: {error}") from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = sorted(str(name) for name in report[kind])
            if names:
                what = kind.replace("_keys", "")
                raise ConfigError(f"path: {len(names)} {what} tensors in {str(folder)!r}: {', '.join(names[:3])}.")
        check_finite(model.state_dict(), folder)
        return model.to(self.device).eval()

    def swap(self, weights: object) -> None:
        self._model = weights

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Called by the model's layers with (1, head, N, dim); returns (1, N, head, dim)."""
        refused = [name for name in REFUSED if options.get(name) is not None]
        assert self._batch is not None
        assert self._attention is not None
        if refused:
            raise ConfigError(f"model: its attention needs {', '.join(refused)}, which this engine does not compute.")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        out = self._attention(module.layer_idx, self._batch, q, k, v, options.get("scaling") or q.shape[-1] ** -0.5)
        return out[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are the spans' own affair."""
