"""Attention over a packed trie: every node attends to its ancestors and itself, and to nothing else.

There are two ways to compute it. `tiles` gathers the keys of each path and needs plain matrix products only; `flex` is
PyTorch's block-sparse kernel, which skips the blocks of the mask that are empty and exists for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.backends.flex import FlexTree
from outrider.backends.packing import Chain
from outrider.backends.tiles import TiledTree
from outrider.errors import ConfigError

NAME = "outrider_tree"
"""Under which the attention function is registered with transformers."""


class Tree(Protocol):
    """How one pack is attended to. Made once for a micro-batch, used by every layer."""

    @property
    def windows(self) -> Set[int | None]:
        """Those that a layer has asked for; most models have one."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """``(H, N, D), (G, N, D), (G, N, E) -> (N, H, E)``, where G heads of keys serve H of queries.

        E is D but for latent attention (MLA), whose queries and keys are longer than its values. `window` limits how
        far back a query sees, in tokens, itself included.
        """


MakeTree = Callable[[Sequence[Chain], torch.device], Tree]
WAYS: MappingProxyType[str, MakeTree] = MappingProxyType({"tiles": TiledTree, "flex": FlexTree})


def ways(name: str, device: torch.device) -> list[MakeTree]:
    """What to try on `device`, in this order. ``auto`` takes flex on a GPU, and tiles where that does not work."""
    if name == "auto":
        return [FlexTree, TiledTree] if device.type == "cuda" else [TiledTree]
    if name not in WAYS:
        raise ConfigError(f"train.attention: there is no {name!r}. Known: auto, {', '.join(WAYS)}.")
    if name == "flex" and device.type == "cpu":
        raise ConfigError("train.attention: PyTorch's flex attention has no backward pass on a CPU; use auto or tiles.")
    return [WAYS[name]]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    outrider_tree: Tree | None = None,
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return outrider_tree.attend(query[0], key[0], value[0], scale, sliding_window)[None], None
