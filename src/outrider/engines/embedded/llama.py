"""Forward pass of Llama-like models (llama, mistral, qwen2, qwen3) over flat batches.

The arithmetic follows transformers' modules operation by operation, so that log-probs agree with a trainer that uses
those. What is gained: one product for q, k and v, one for gate and up, weights packed once for the CPU's bfloat16
kernels, and a fraction of the calls per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.engines.embedded.attention import Attention
from outrider.engines.embedded.batch import Batch
from outrider.engines.embedded.checkpoint import check_tensors, read_tensors
from outrider.engines.embedded.model import Shape

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the sequence."""


def supports(config: Any, folder: Path) -> bool:
    """Whether `LlamaModel` computes what the model's own code would."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in MODEL_TYPES
        and getattr(config, "hidden_act", "") == "silu"
        and rope.get("rope_type", "default") in ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and getattr(config, "quantization_config", None) is None
        and any(folder.glob("model*.safetensors"))
    )


class Linear:
    """``x @ weight.T + bias``. On a CPU in bfloat16 the weight is laid out for the kernel once: half the time."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32) if self._packed else weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], ""))
        return F.linear(x, self._weight, self._bias)


def _can_pack() -> bool:
    # Operators without a public name (torch.compile uses them): asked for, and not relied upon.
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and bool(operators._is_mkldnn_bf16_supported())


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Linear


class LlamaModel:
    """A `Model`. `forward` and `swap` belong to one thread; `read` may be called from any."""

    def __init__(self, config: Any, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._config = config
        self._heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self.shape = Shape(
            layers=int(config.num_hidden_layers),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or self._heads),
            head_dim=head_dim,
            vocabulary=int(config.vocab_size),
            max_positions=int(config.max_position_embeddings),
        )
        self._scale = head_dim**-0.5
        self._eps = float(config.rms_norm_eps)
        self._cos, self._sin = self._rotary_tables()
        self._expected: dict[str, torch.Size] = {}
        self._weights = self.read(folder)

    def read(self, folder: Path) -> Weights:
        tensors = read_tensors(folder)
        if self._config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
        tensors = {name: t for name, t in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        self._expected = self._expected or self._shapes(tensors)
        check_tensors(tensors, self._expected, folder)
        return self._fuse({name: t.to(self.device, self.dtype) for name, t in tensors.items()})

    def swap(self, weights: object) -> None:
        assert isinstance(weights, Weights)
        self._weights = weights

    def forward(self, batch: Batch, attention: Attention) -> Tensor:
        """See `Model`. Shapes below: N tokens, hidden size H."""
        weights, heads, kv_heads = self._weights, self._heads, self.shape.kv_heads
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        x = F.embedding(batch.tokens, weights.embedding)  # (N, H)
        count = x.shape[0]
        for i, layer in enumerate(weights.layers):
            normed = self._norm(x, layer.input_norm)
            qkv = layer.qkv(normed).view(count, heads + 2 * kv_heads, -1)
            if layer.q_norm is None or layer.k_norm is None:
                qk = qkv[:, : heads + kv_heads]
            else:
                q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
                qk = torch.cat([self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)], 1)
            first, second = qk.chunk(2, -1)
            qk = qk * cos + torch.cat((-second, first), -1) * sin
            attended = attention(i, batch, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], self._scale)
            x = x + layer.out(attended.reshape(count, -1))
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return weights.head(self._norm(x[batch.rows], weights.norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self._eps)
        return weight * h.to(x.dtype)

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines (position, 1, dim), as transformers' rotary embeddings give them."""
        rope = self._config.rope_parameters
        kind = rope.get("rope_type", "default")
        dim = self.shape.head_dim
        if kind == "default":
            inverse, factor = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
        else:
            inverse, factor = ROPE_INIT_FUNCTIONS[kind](self._config)
        angles = torch.arange(self.shape.max_positions).float()[:, None] * inverse
        angles = torch.cat([angles, angles], -1)[:, None].to(self.device)
        return (angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype)

    def _shapes(self, tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Names and shapes the model must have. Biases and q/k norms are expected where the first file has them."""
        c, dim = self._config, self.shape.head_dim
        hidden, inner, vocabulary = int(c.hidden_size), int(c.intermediate_size), int(c.vocab_size)
        q, kv = self._heads * dim, self.shape.kv_heads * dim
        linears = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if not c.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocabulary, hidden)
        for i in range(self.shape.layers):
            prefix = f"model.layers.{i}."
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
            for name, shape in linears.items():
                shapes[f"{prefix}{name}.weight"] = shape
                if f"{prefix}{name}.bias" in tensors:
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                if prefix + name in tensors:
                    shapes[prefix + name] = (dim,)
        return {name: torch.Size(shape) for name, shape in shapes.items()}

    def _fuse(self, tensors: Mapping[str, Tensor]) -> Weights:
        layers = []
        for i in range(self.shape.layers):
            prefix = f"model.layers.{i}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            layers.append(
                Layer(
                    input_norm=tensors[prefix + "input_layernorm.weight"],
                    qkv=_joined(tensors, *(f"{attention}{x}_proj" for x in "qkv")),
                    q_norm=tensors.get(attention + "q_norm.weight"),
                    k_norm=tensors.get(attention + "k_norm.weight"),
                    out=_joined(tensors, attention + "o_proj"),
                    post_norm=tensors[prefix + "post_attention_layernorm.weight"],
                    gate_up=_joined(tensors, mlp + "gate_proj", mlp + "up_proj"),
                    down=_joined(tensors, mlp + "down_proj"),
                )
            )
        embedding = tensors["model.embed_tokens.weight"]
        head = embedding if self._config.tie_word_embeddings else tensors["lm_head.weight"]
        return Weights(embedding=embedding, layers=layers, norm=tensors["model.norm.weight"], head=Linear(head))


def _joined(tensors: Mapping[str, Tensor], *names: str) -> Linear:
    """One layer that computes several side by side. A bias that only some have is 0 for the others."""
    weights = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors.get(f"{name}.bias") for name in names]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)])
    return Linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)
