"""Attention over a packed trie: every node attends to its ancestors and itself, and to nothing else.

The mask of such a sequence is almost empty, so it is never built. Chains are cut into blocks of at most `BLOCK`
queries; the keys of a block are its path, gathered. Blocks of similar shape are padded to one batch, a **tile**, and
attended to with two matrix products and a softmax between. On a CPU this is about three times as fast as the fused
kernel with a mask, and exact to rounding. Probabilities are computed anew in the backward pass, so that memory stays
linear in the length of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.backends.packing import Chain, Index

NAME = "outrider_tree"
"""Under which the attention function is registered with transformers."""

BLOCK = 128
TILE_SCORES = 1 << 21
"""Query-key pairs in one tile at most, which bounds the memory for its scores: 2**21 pairs are 4 MiB a head in bf16."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of similar shape: B of them, padded to Q queries and K keys."""

    queries: Tensor
    """int64 (B * Q,): nodes; padding points at node 0."""
    keys: Tensor
    """int64 (B * K,): nodes of the paths; padding points at node 0."""
    hidden: Tensor
    """bool (B, 1, Q, K'): of the last K' keys those that a query must not see, padding included; it sees all others."""
    padding: Tensor
    """bool (B * Q, 1): queries that do not exist."""
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pack is attended to. Made once for a micro-batch, used by every layer."""

    tiles: tuple[Tile, ...]
    place: Tensor
    """int64 (N,): where a node's output lies in the outputs of all tiles laid end to end."""


class TreePlans:
    """The plans of one pack, one for each window that its layers use; most models have one."""

    def __init__(self, chains: Sequence[Chain], device: torch.device) -> None:
        self._chains, self._device = chains, device
        self._plans: dict[int | None, Plan] = {}

    @property
    def windows(self) -> set[int | None]:
        """Those that a layer has asked for."""
        return set(self._plans)

    def plan(self, window: int | None) -> Plan:
        if window not in self._plans:
            self._plans[window] = make_plan(self._chains, self._device, window)
        return self._plans[window]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider_tree: TreePlans | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: ``(1, H, N, D)``, ``(1, G, N, D)``, ``(1, G, N, E)`` to ``(1, N, H, E)``.

    The signature is that of its attention interface. Raises `NotImplementedError` for what changes the scores in a
    way that is not done here, so that the model is run without tree attention.
    """
    if outrider_tree is None:
        raise NotImplementedError("the model does not hand its keyword arguments to its attention layers")
    if attention_mask is not None:
        raise NotImplementedError("its layers make a mask of their own")
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise NotImplementedError(f"its attention uses {name}")
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = outrider_tree.plan(sliding_window)
    return TreeAttention.apply(q, k, v, plan, scale)[None], None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    stop: int
    keys: Index


def make_plan(chains: Sequence[Chain], device: torch.device, window: int | None = None) -> Plan:
    """Group the chains of a pack into tiles. `window` limits how far back a query sees, in tokens, itself included."""
    blocks = [block for chain in chains for block in _blocks(chain)]
    blocks.sort(key=lambda block: (-(-(block.stop - block.start) // 32), len(block.keys), block.start))
    place = np.zeros(sum(block.stop - block.start for block in blocks), dtype=np.int64)
    tiles: list[Tile] = []
    offset = 0
    for group in _groups(blocks):
        queries = max(block.stop - block.start for block in group)
        for index, block in enumerate(group):
            first = offset + index * queries
            place[block.start : block.stop] = np.arange(first, first + block.stop - block.start)
        tiles.append(_tile(group, device, window))
        offset += len(group) * queries
    return Plan(tiles=tuple(tiles), place=torch.from_numpy(place).to(device))


def _blocks(chain: Chain) -> list[_Block]:
    depth = len(chain.path) - (chain.stop - chain.start)
    return [
        _Block(
            start, min(start + BLOCK, chain.stop), chain.path[: depth + min(start + BLOCK, chain.stop) - chain.start]
        )
        for start in range(chain.start, chain.stop, BLOCK)
    ]


def _groups(blocks: Sequence[_Block]) -> list[list[_Block]]:
    """Cut a sorted list of blocks into groups where padding costs at most a third."""
    groups: list[list[_Block]] = []
    real = queries = keys = 0
    for block in blocks:
        length = block.stop - block.start
        queries, keys = max(queries, length), max(keys, len(block.keys))
        real += length * len(block.keys)
        padded = queries * keys * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > TILE_SCORES or 3 * padded > 4 * real:
            groups.append([])
            queries, keys, real = length, len(block.keys), length * len(block.keys)
        groups[-1].append(block)
    return groups


def _tile(group: Sequence[_Block], device: torch.device, window: int | None) -> Tile:
    size = len(group)
    width, height = max(len(block.keys) for block in group), max(block.stop - block.start for block in group)
    queries = np.zeros((size, height), dtype=np.int64)
    depths = np.zeros((size, height), dtype=np.int64)
    padding = np.ones((size, height), dtype=np.bool_)
    keys = np.zeros((size, width), dtype=np.int64)
    for index, block in enumerate(group):
        length, path = block.stop - block.start, len(block.keys)
        queries[index, :length] = np.arange(block.start, block.stop)
        depths[index, :length] = np.arange(path - length, path)
        padding[index, :length] = False
        keys[index, :path] = block.keys
    seen = np.arange(width) <= depths[:, :, None]
    first = min(len(block.keys) - (block.stop - block.start) for block in group)  # a prefix that all queries see
    if window is not None:
        seen &= np.arange(width) > depths[:, :, None] - window
        first = 0
    return Tile(
        queries=torch.from_numpy(queries.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        hidden=torch.from_numpy(~seen[:, None, :, first:]).to(device),
        padding=torch.from_numpy(padding.reshape(-1, 1)).to(device),
        shape=(size, height, width),
    )


class TreeAttention(torch.autograd.Function):
    """``(q (N, H, D), k (N, G, D), v (N, G, E)) -> (N, H, E)`` where G heads of keys serve H = G * R of queries.

    E is D but for latent attention (MLA), whose queries and keys are longer than its values.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale = plan, scale
        outputs = []
        for tile in plan.tiles:
            tile_q, tile_k, tile_v = _gather(tile, q, k, v)
            outputs.append(_spread(torch.bmm(_probabilities(tile, tile_q, tile_k, scale), tile_v), tile, k.shape[1]))
        return torch.cat(outputs)[plan.place].view(*q.shape[:2], v.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        (grad,) = grads
        grad = grad.contiguous()
        grads_q = []
        # A key's gradient is a sum over all rows below it: kept in float32, whatever the model computes in.
        grad_k = torch.zeros(k.shape[0], k.shape[1] * k.shape[2], dtype=torch.float32, device=k.device)
        grad_v = torch.zeros(v.shape[0], v.shape[1] * v.shape[2], dtype=torch.float32, device=v.device)
        for tile in ctx.plan.tiles:
            tile_q, tile_k, tile_v = _gather(tile, q, k, v)
            p = _probabilities(tile, tile_q, tile_k, ctx.scale)
            tile_grad = _fold(grad.flatten(1)[tile.queries].masked_fill_(tile.padding, 0), tile, v.shape[1], v.shape[2])
            grad_v.index_add_(0, tile.keys, _unfold_keys(torch.bmm(p.transpose(1, 2), tile_grad), tile).float())
            grad_p = torch.bmm(tile_grad, tile_v.transpose(1, 2))
            grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(ctx.scale)
            grads_q.append(_spread(torch.bmm(grad_s, tile_k), tile, k.shape[1]))
            grad_k.index_add_(0, tile.keys, _unfold_keys(torch.bmm(grad_s.transpose(1, 2), tile_q), tile).float())
        grad_q = torch.cat(grads_q)[ctx.plan.place].view_as(q)
        return grad_q, grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype), None, None


def _gather(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B * G, R * Q, D), keys (B * G, K, D) and values (B * G, K, E) of a tile."""
    size, _, width = tile.shape
    heads = k.shape[1]
    tile_k, tile_v = (
        item.flatten(1)[tile.keys].view(size, width, heads, -1).transpose(1, 2).reshape(size * heads, width, -1)
        for item in (k, v)
    )
    return _fold(q.flatten(1)[tile.queries], tile, heads, q.shape[2]), tile_k, tile_v


def _probabilities(tile: Tile, tile_q: Tensor, tile_k: Tensor, scale: float) -> Tensor:
    """Attention probabilities of a tile, (B * G, R * Q, K)."""
    size, height, width = tile.shape
    scores = torch.bmm(tile_q, tile_k.transpose(1, 2)).mul_(scale)
    tail = scores.view(size, -1, height, width)[..., width - tile.hidden.shape[-1] :]
    tail.masked_fill_(tile.hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)


def _fold(rows: Tensor, tile: Tile, heads: int, depth: int) -> Tensor:
    """``(B * Q, H * D)`` to ``(B * G, R * Q, D)``: query heads that share a key head become more queries of it."""
    size, height, _ = tile.shape
    return rows.view(size, height, heads, -1, depth).permute(0, 2, 3, 1, 4).reshape(size * heads, -1, depth)


def _spread(folded: Tensor, tile: Tile, heads: int) -> Tensor:
    """The way back: ``(B * G, R * Q, D)`` to ``(B * Q, H * D)``."""
    size, height, _ = tile.shape
    split = folded.view(size, heads, -1, height, folded.shape[-1])
    return split.permute(0, 3, 1, 2, 4).reshape(size * height, -1)


def _unfold_keys(folded: Tensor, tile: Tile) -> Tensor:
    """``(B * G, K, D)`` to ``(B * K, G * D)``."""
    size, _, width = tile.shape
    return folded.view(size, -1, width, folded.shape[-1]).transpose(1, 2).reshape(size * width, -1)
