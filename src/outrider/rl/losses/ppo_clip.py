"""PPO's clipped surrogate, with bounds of its own on each side.

Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347; the asymmetric bounds are DAPO's
"clip higher", arXiv:2503.14476: more room above lets unlikely tokens rise.
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def ppo_clip(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    ratio = torch.exp(tokens.log_ratio)
    free = ratio * tokens.advantages
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * tokens.advantages
    return TokenLoss(loss=-torch.minimum(free, bounded), clipped=bounded < free)
