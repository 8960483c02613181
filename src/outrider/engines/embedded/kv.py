"""Keys and values: one contiguous row of positions per slot, and a pool of blocks that prefixes are kept in."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.types import IntArray

BLOCK = 16
"""Tokens in a block of the prefix cache."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory the system hands out only when it is written to. (On a GPU it is all taken at once.)

    Not `torch.empty`: positions that are masked out still meet a weight of 0, and 0 times garbage may be NaN. Not
    `numpy.zeros`: it asks for huge pages, with which a few tokens a slot would take up all of the memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(*shape)


class Slots:
    """Room for `slots` sequences of `length` positions. `data` is (layer, key/value, slot, head, position, dim)."""

    def __init__(
        self, *, layers: int, slots: int, heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = zeros((layers, 2, slots, heads, length, dim), dtype, device)
        self.layers = list(self.data.unbind(0))
        """Per layer (key/value, slot, head, position, dim)."""

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put N tokens in their places. `slots`, `positions` (N,); `keys`, `values` (N, head, dim)."""
        target = self.layers[layer]
        target[0][slots, :, positions] = keys
        target[1][slots, :, positions] = values

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]


def block_keys(tokens: IntArray) -> list[bytes]:
    """One key for each full block of `tokens`; it depends on the block and on everything before it."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    width = BLOCK * 4
    keys: list[bytes] = []
    previous = b""
    for start in range(0, len(data) - width + 1, width):
        previous = hashlib.blake2b(previous + data[start : start + width], digest_size=16).digest()
        keys.append(previous)
    return keys


class PrefixPool:
    """Blocks of keys and values by the tokens that led to them; the least recently used ones make room."""

    def __init__(self, slots: Slots, tokens: int) -> None:
        layers, _, _, heads, _, dim = slots.data.shape
        self._slots = slots
        self.capacity = tokens // BLOCK
        self._blocks = zeros((layers, 2, self.capacity, heads, BLOCK, dim), slots.data.dtype, slots.data.device)
        self._index: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.capacity))

    def __len__(self) -> int:
        return len(self._index)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks are here."""
        for n, key in enumerate(keys):
            if key not in self._index:
                return n
        return len(keys)

    def restore(self, keys: Sequence[bytes], slot: int) -> None:
        """Copy blocks, all of them present, to the head of a slot."""
        self._touch(keys)
        chosen = torch.tensor([self._index[key] for key in keys], dtype=torch.long, device=self._blocks.device)
        found = self._blocks[:, :, chosen].transpose(2, 3)  # (layer, 2, head, block, BLOCK, dim)
        self._slots.data[:, :, slot, :, : len(keys) * BLOCK] = found.flatten(3, 4)

    def store(self, keys: Sequence[bytes], slot: int) -> None:
        """Keep the leading blocks of a slot. Blocks that don't fit are left out from the end."""
        keys = keys[: self.capacity]
        first = self.match(keys)
        self._touch(keys[:first])
        new = list(keys[first:])
        if not new:
            return
        # Blocks behind a gap may still be here; they are put in place again rather than kept twice.
        places = [self._index.pop(key, -1) for key in new]
        places = [self._free_place() if place < 0 else place for place in places]
        chosen = torch.tensor(places, device=self._blocks.device)
        span = self._slots.data[:, :, slot, :, first * BLOCK : len(keys) * BLOCK]
        self._blocks[:, :, chosen] = span.reshape(*span.shape[:3], len(new), BLOCK, -1).transpose(2, 3)
        self._index.update(zip(new, places, strict=True))
        self._touch(keys)

    def clear(self) -> None:
        self._index.clear()
        self._free = list(range(self.capacity))

    def _free_place(self) -> int:
        return self._free.pop() if self._free else self._index.popitem(last=False)[1]

    def _touch(self, keys: Sequence[bytes]) -> None:
        # Last block first: a chain loses its end before its head, without which the rest could not be found.
        for key in reversed(keys):
            self._index.move_to_end(key)
