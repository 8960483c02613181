"""Tree attention by PyTorch's flex attention: block-sparse, one fused kernel on a GPU.

A pack lies in preorder, so what is below a node is a run that begins with it, and the mask takes one number a node:
where that run ends. Dong et al. 2024, Flex Attention, arXiv:2412.05496.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from outrider.backends.packing import Chain

NO_WINDOW = 1 << 30

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexTree:
    """Satisfies `outrider.backends.tree_attention.Tree`: a block mask for each window that the layers use."""

    def __init__(self, chains: Sequence[Chain], device: torch.device) -> None:
        self._size, self._device = chains[-1].stop, device
        end, depth = np.zeros((2, self._size), dtype=np.int64)
        for chain in chains:
            end[chain.path] = chain.stop  # the last chain below a node is the one that counts
            depth[chain.path] = np.arange(len(chain.path))
        self._end, self._depth = torch.from_numpy(end).to(device), torch.from_numpy(depth).to(device)
        self._masks: dict[int | None, BlockMask] = {}

    @property
    def windows(self) -> Set[int | None]:
        return self._masks.keys()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        run = _compiled() if self._device.type == "cuda" else flex_attention
        mask = self.block_mask(window)
        heads: Tensor = run(query[None], key[None], value[None], block_mask=mask, scale=scale, enable_gqa=True)
        return heads[0].transpose(0, 1)

    def block_mask(self, window: int | None) -> BlockMask:
        """Which blocks of queries and keys are computed, and which of these in part."""
        if window not in self._masks:
            mask, size = self.mask(window), self._size
            self._masks[window] = create_block_mask(mask, None, None, size, size, device=self._device)
        return self._masks[window]

    def mask(self, window: int | None) -> MaskMod:
        """The rule by which a query node sees a key node."""
        end, depth = self._end, self._depth
        reach = NO_WINDOW if window is None else window  # not the size of the pack: each would be compiled anew

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < end[key]) & (depth[query] - depth[key] < reach)

        return seen


@functools.cache
def _compiled() -> Any:
    """Without compilation flex attention computes every score, the masked ones too."""
    return torch.compile(flex_attention)
