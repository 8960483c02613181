"""What a loss gets and what it gives.

Three policies may be told apart: the **behaviour** that sampled the tokens (the engine's weights and kernels), the
**old** or proximal one (the trainer's weights before the update), and the one being trained. A loss bounds how far the
last moves from the old one; what lies between behaviour and old is the matter of `outrider.rl.correction`. Where no old
log-probs are given the behaviour stands for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The trained tokens of whole rows, laid end to end; every tensor has shape (N,), float32 but for `row`."""

    logp: Tensor
    """Log-probs under the weights being trained; the only one with a gradient."""
    behaviour_logp: Tensor
    """Log-probs as the engine sampled."""
    old_logp: Tensor | None = None
    """Log-probs under the weights before the update; None takes the behaviour's."""
    advantages: Tensor
    row: Tensor
    """int64: which row a token belongs to, from 0 without gaps. A row is never split over two `Tokens`."""

    @property
    def log_ratio(self) -> Tensor:
        """log(trained / old), within ±20: beyond it the ratio says nothing, and must not become infinite."""
        old = self.behaviour_logp if self.old_logp is None else self.old_logp
        return (self.logp - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` over each token's own row, shape (N,); added up in float64, as rows may be long."""
        rows = int(self.row.max()) + 1 if len(self.row) else 0
        sums = torch.zeros(rows, dtype=torch.float64, device=values.device).index_add(0, self.row, values.double())
        return (sums / torch.bincount(self.row, minlength=rows).clamp(min=1))[self.row].to(values.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    loss: Tensor
    """Shape (N,)."""
    clipped: Tensor
    """bool (N,): where clipping took part of the gradient away."""
