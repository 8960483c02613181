"""CISPO: clip the importance weight, not the token.

MiniMax 2025, MiniMax-M1, arXiv:2506.13585. The clipped ratio is a constant factor before the log-prob, so a token
beyond the bounds keeps a gradient, where PPO's clip would drop it. The paper sets no lower bound; that is
``clip_low = 1``.
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def cispo(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    ratio = torch.exp(tokens.log_ratio.detach())
    weight = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    return TokenLoss(loss=-weight * tokens.advantages * tokens.logp, clipped=weight != ratio)
