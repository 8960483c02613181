"""The plain policy gradient: raise the log-prob of what went well.

Williams 1992. There is no importance ratio, so it is exact only for tokens sampled from the weights being trained.
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def reinforce(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    return TokenLoss(loss=-tokens.advantages * tokens.logp, clipped=torch.zeros_like(tokens.logp, dtype=torch.bool))
