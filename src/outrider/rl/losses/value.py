"""The critic's loss: squared error, with its step bounded as PPO's code does.

Schulman et al. 2017, arXiv:1707.06347, by its published code (Huang et al. 2022, The 37 Implementation Details of
PPO): with V the value before the update, the prediction counts no closer to the return than V ± clip lets it,

    max((v - R)**2, (clamp(v, V - clip, V + clip) - R)**2) / 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor | None, spec: LossSpec) -> TokenLoss:
    """One loss a trained token. All have shape (N,); only `values` carries a gradient. Unbounded without `old_values`
    or with ``spec.value_clip == 0``."""
    free = (values - returns).square()
    if old_values is None or not spec.value_clip:
        return TokenLoss(loss=free / 2, clipped=torch.zeros_like(free, dtype=torch.bool))
    bounded = (values.clamp(old_values - spec.value_clip, old_values + spec.value_clip) - returns).square()
    return TokenLoss(loss=torch.maximum(free, bounded) / 2, clipped=bounded > free)
