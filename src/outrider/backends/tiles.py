"""Tree attention in plain tensor operations, for any device and fast on a CPU.

The mask of a packed trie is almost empty, so it is never built. Chains are cut into blocks of at most `BLOCK` queries;
the keys of a block are its path, gathered. Blocks of similar shape are padded to one batch, a **tile**, and attended
to with two matrix products and a softmax between. On a CPU this is about three times as fast as the fused kernel, with
a mask or without, and exact to rounding. Probabilities are computed anew in the backward pass, so that memory stays
linear in the length of rows.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.backends.packing import Chain, Index

BLOCK = 128
"""Queries in one block at most. Blocks of equal but odd length waste less and are slower."""

TILE_SCORES = MappingProxyType({"cpu": 1 << 18})
"""Query-key pairs in one tile at most, by kind of device. On a CPU the scores of all heads should stay in its cache:
2**18 pairs are half a MiB a head in bfloat16, and the whole is twice as fast as with 2**21."""

OTHER_TILE_SCORES = 1 << 21
"""The same where nothing is said above: it bounds the memory for scores."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of similar shape: B of them, padded to Q queries and K keys."""

    queries: Tensor
    """int64 (B * Q,): nodes; padding points at node 0."""
    keys: Tensor
    """int64 (B * K,): nodes of the paths; padding points at node 0."""
    bias: Tensor
    """bfloat16 (B, Q, 1, K'): of the last K' keys -inf where a query must not see one, padding included, else 0. It
    sees all others. To add it is six times as fast on a CPU as to fill by a mask."""
    padding: Tensor
    """bool (B * Q, 1, 1): queries that do not exist."""
    shape: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a pack is attended to. Made once for a micro-batch, used by every layer."""

    tiles: tuple[Tile, ...]
    place: Tensor
    """int64 (N,): where a node's output lies in the outputs of all tiles laid end to end."""


class TiledTree:
    """Satisfies `outrider.backends.tree_attention.Tree`: a plan for each window that the layers use."""

    def __init__(self, chains: Sequence[Chain], device: torch.device) -> None:
        self._chains, self._device = chains, device
        self._plans: dict[int | None, Plan] = {}

    @property
    def windows(self) -> Set[int | None]:
        return self._plans.keys()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self._plans:
            self._plans[window] = make_plan(self._chains, self._device, window)
        return TreeAttention.apply(query, key, value, self._plans[window], scale)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    stop: int
    keys: Index
    """The part of the path that its queries may see; ends with the block itself."""


def make_plan(chains: Sequence[Chain], device: torch.device, window: int | None = None) -> Plan:
    """Group the chains of a pack into tiles. `window` limits how far back a query sees, in tokens, itself included."""
    blocks = [block for chain in chains for block in _blocks(chain, window)]
    blocks.sort(key=lambda block: (-(-(block.stop - block.start) // 32), len(block.keys), block.start))
    place = np.zeros(sum(block.stop - block.start for block in blocks), dtype=np.int64)
    tiles: list[Tile] = []
    offset = 0
    for group in _groups(blocks, TILE_SCORES.get(device.type, OTHER_TILE_SCORES)):
        queries = max(block.stop - block.start for block in group)
        for index, block in enumerate(group):
            first = offset + index * queries
            place[block.start : block.stop] = np.arange(first, first + block.stop - block.start)
        tiles.append(_tile(group, device, window))
        offset += len(group) * queries
    return Plan(tiles=tuple(tiles), place=torch.from_numpy(place).to(device))


def _blocks(chain: Chain, window: int | None) -> list[_Block]:
    depth = len(chain.path) - (chain.stop - chain.start)
    blocks = []
    for start in range(chain.start, chain.stop, BLOCK):
        stop = min(start + BLOCK, chain.stop)
        first = 0 if window is None else max(0, depth + start - chain.start - window + 1)
        blocks.append(_Block(start, stop, chain.path[first : depth + stop - chain.start]))
    return blocks


def _groups(blocks: Sequence[_Block], most: int) -> list[list[_Block]]:
    """Cut a sorted list of blocks into groups of at most `most` pairs, where padding costs at most a third."""
    groups: list[list[_Block]] = []
    real = queries = keys = 0
    for block in blocks:
        length = block.stop - block.start
        queries, keys = max(queries, length), max(keys, len(block.keys))
        real += length * len(block.keys)
        padded = queries * keys * (len(groups[-1]) + 1) if groups else 0
        if not groups or padded > most or 3 * padded > 4 * real:
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
    bias = torch.zeros(size, height, 1, width - first, dtype=torch.bfloat16, device=device)
    return Tile(
        queries=torch.from_numpy(queries.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        bias=bias.masked_fill_(torch.from_numpy(~seen[:, :, None, first:]).to(device), float("-inf")),
        padding=torch.from_numpy(padding.reshape(-1, 1, 1)).to(device),
        shape=(size, height, width),
    )


class TreeAttention(torch.autograd.Function):
    """``(q (H, N, D), k (G, N, D), v (G, N, E)) -> (N, H, E)`` where G heads of keys serve H = G * R of queries.

    Inside, all are (G, N, R, D) with R = 1 for keys and values: query heads that share keys are R more queries of a
    node, and what a tile gathers lies together.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
        q, k, v = (_by_key_head(item, k.shape[0]) for item in (q, k, v))
        q.mul_(scale)
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale = plan, scale
        outputs = []
        for tile in plan.tiles:
            p = _probabilities(tile, _gather(tile, tile.queries, q), _gather(tile, tile.keys, k), q.shape[2])
            outputs.append(_spread(tile, torch.bmm(p, _gather(tile, tile.keys, v)), q.shape[2]))
        return _by_node(torch.cat(outputs, dim=1).index_select(1, plan.place))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad = _by_key_head(grads[0].transpose(0, 1), k.shape[0])
        grads_q = []
        # A key's gradient is a sum over all rows below it: kept in float32, whatever the model computes in.
        grad_k, grad_v = (torch.zeros(item.shape, dtype=torch.float32, device=item.device) for item in (k, v))
        for tile in ctx.plan.tiles:
            tile_q, tile_k = _gather(tile, tile.queries, q), _gather(tile, tile.keys, k)
            p = _probabilities(tile, tile_q, tile_k, q.shape[2])
            tile_grad = _gather(tile, tile.queries, grad, tile.padding)
            _add_keys(grad_v, tile, torch.bmm(p.transpose(1, 2), tile_grad))
            grad_p = torch.bmm(tile_grad, _gather(tile, tile.keys, v).transpose(1, 2))
            grad_s = torch._softmax_backward_data(grad_p, p, -1, p.dtype)
            grads_q.append(_spread(tile, torch.bmm(grad_s, tile_k), q.shape[2]))
            _add_keys(grad_k, tile, torch.bmm(grad_s.transpose(1, 2), tile_q))
        grad_q = _by_node(torch.cat(grads_q, dim=1).index_select(1, ctx.plan.place)).mul_(ctx.scale)
        return grad_q.transpose(0, 1), grad_k[:, :, 0].to(k.dtype), grad_v[:, :, 0].to(v.dtype), None, None


def _by_key_head(heads: Tensor, groups: int) -> Tensor:
    """``(G * R, N, D)`` to ``(G, N, R, D)``, a copy."""
    _, nodes, depth = heads.shape
    return heads.reshape(groups, -1, nodes, depth).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _by_node(rows: Tensor) -> Tensor:
    """``(G, N, R, D)`` to ``(N, G * R, D)``."""
    return rows.transpose(0, 1).flatten(1, 2)


def _gather(tile: Tile, nodes: Tensor, rows: Tensor, padding: Tensor | None = None) -> Tensor:
    """The `nodes` of a tile's B blocks from ``(G, N, R, D)``, 0 for padding: ``(G * B, nodes of a block * R, D)``."""
    taken = rows.index_select(1, nodes)
    if padding is not None:
        taken.masked_fill_(padding, 0)
    return taken.view(rows.shape[0] * tile.shape[0], -1, rows.shape[3])


def _spread(tile: Tile, folded: Tensor, repeats: int) -> Tensor:
    """The way back: ``(G * B, Q * R, D)`` to ``(G, B * Q, R, D)``."""
    size, height, _ = tile.shape
    return folded.view(-1, size * height, repeats, folded.shape[2])


def _add_keys(total: Tensor, tile: Tile, folded: Tensor) -> None:
    """Add ``(G * B, K, D)`` to the rows of `total`, (G, N, 1, D), that the tile's keys are."""
    groups, nodes, _, depth = total.shape
    first = torch.arange(groups, device=total.device)[:, None] * nodes
    total.view(-1, depth).index_add_(0, (first + tile.keys).view(-1), folded.view(-1, depth).float())


def _probabilities(tile: Tile, tile_q: Tensor, tile_k: Tensor, repeats: int) -> Tensor:
    """Attention probabilities of a tile, ``(G * B, Q * R, K)``; `tile_q` is scaled."""
    size, height, width = tile.shape
    scores = torch.bmm(tile_q, tile_k.transpose(1, 2))
    tail = scores.view(-1, size, height, repeats, width)[..., width - tile.bias.shape[-1] :]
    tail.add_(tile.bias.to(scores.dtype))
    return torch.softmax(scores, dim=-1)
