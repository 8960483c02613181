"""Attention of flat tokens over the slot cache. Grouped-query heads share keys without copying them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.engines.embedded.batch import Batch, Span
from outrider.engines.embedded.kv import Slots

FUSED_FROM = 1 << 17
"""Scores a head from which the fused kernel, which does not write them to memory, is the faster one on a CPU."""


class Attention:
    """Computes attention for one batch at a time, layer by layer."""

    def __init__(self, cache: Slots) -> None:
        self._cache = cache

    def __call__(self, layer: int, batch: Batch, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store the new keys and values, then attend. `q` (N, query head, dim), `k`, `v` (N, head, dim) -> like `q`.

        Scores are multiplied by `scale`.
        """
        self._cache.write(layer, batch.slots, batch.positions, k, v)
        cache = self._cache.layers[layer]
        outs = [_attend(cache, span, q[span.first : span.first + span.tokens], scale) for span in batch.spans]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(cache: Tensor, span: Span, q: Tensor, scale: float) -> Tensor:
    """One span: `q` (tokens, heads, dim) -> the same."""
    heads, dim = q.shape[1:]
    if span.grid is not None:
        full = q.new_zeros(span.slots * span.width, heads, dim)
        full[span.grid] = q
        q = full
    keys, values = cache[:, span.slot : span.slot + span.slots, :, : span.length]
    q = q.view(span.slots, span.width, heads, dim)
    if span.width == 1:
        out = _one_token(q, keys, values, span, scale)
    elif span.width * span.length >= FUSED_FROM or q.is_cuda:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=span.mask[:, None].to(q.dtype),
            scale=scale,
            enable_gqa=True,
        ).transpose(1, 2)
    else:
        out = _many_tokens(q, keys, values, span, scale)
    out = out.reshape(span.slots * span.width, heads, dim)
    return out if span.grid is None else out[span.grid]


def _one_token(q: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float) -> Tensor:
    """Decode. `q` (R, 1, heads, dim), `keys` (R, kv heads, L, dim); the G queries of a group meet its keys together."""
    slots, _, heads, dim = q.shape
    groups, shared = keys.shape[1], span.shared
    q = q.view(slots, groups, heads // groups, dim)
    # keys @ q^T: the same numbers as q @ keys^T, and three times as fast on a CPU for so few queries.
    scores = torch.matmul(keys[:, :, shared:], q.transpose(-1, -2)).transpose(-1, -2).float()
    scores = scores.mul_(scale).add_(span.mask[:, None])
    if not shared:
        return torch.matmul(scores.softmax(-1).to(q.dtype), values)
    # All sequences in one product: (groups, R * G, dim) with the (groups, shared, dim) keys of the first slot.
    together = q.transpose(0, 1).reshape(groups, -1, dim)
    first = torch.matmul(together, keys[0, :, :shared].transpose(-1, -2)).float().mul_(scale)
    first = first.view(groups, slots, -1, shared).transpose(0, 1)
    weights = torch.cat([first, scores], -1).softmax(-1).to(q.dtype)
    head = weights[..., :shared].transpose(0, 1).reshape(groups, -1, shared)
    out = torch.matmul(head, values[0, :, :shared]).view(groups, slots, -1, dim).transpose(0, 1)
    return out + torch.matmul(weights[..., shared:], values[:, :, shared:])


def _many_tokens(q: Tensor, keys: Tensor, values: Tensor, span: Span, scale: float) -> Tensor:
    """Prefill of short pieces. `q` (R, T, heads, dim) -> the same."""
    slots, width, heads, dim = q.shape
    groups = keys.shape[1]
    q = q.view(slots, width, groups, -1, dim).permute(0, 2, 3, 1, 4).reshape(slots, groups, -1, dim)
    scores = torch.matmul(q, keys.transpose(-1, -2)).float().mul_(scale)
    scores = scores.view(slots, groups, -1, width, span.length).add_(span.mask[:, None, None])
    weights = scores.softmax(-1).to(q.dtype).view(slots, groups, -1, span.length)
    out = torch.matmul(weights, values).view(slots, groups, -1, width, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(slots, width, heads, dim)
