"""What a loss gets and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The trained tokens of whole rows, laid end to end; every tensor has shape (N,), float32 but for `row`."""

    logp: Tensor
    """Log-probs under the weights being trained; the only one with a gradient."""
    behaviour_logp: Tensor
    """Log-probs as the engine sampled."""
    advantages: Tensor
    row: Tensor
    """int64: which row a token belongs to, from 0 without gaps. A row is never split over two `Tokens`."""

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.behaviour_logp

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` over each token's own row, shape (N,)."""
        rows = int(self.row.max()) + 1 if len(self.row) else 0
        sums = torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, self.row, values)
        return (sums / torch.bincount(self.row, minlength=rows).clamp(min=1))[self.row]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    loss: Tensor
    """Shape (N,)."""
    clipped: Tensor
    """bool (N,): where clipping took part of the gradient away."""
