"""PPO's clipped surrogate, with bounds of its own on each side, and a second one for what went badly.

Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347; the asymmetric bounds are DAPO's
"clip higher", arXiv:2503.14476: more room above lets unlikely tokens rise. ``dual_clip`` c > 1 is Ye et al. 2019,
arXiv:1912.09729: with a negative advantage the surrogate is unbounded as the ratio grows, so it counts up to c only.

    A >= 0   -min(r A, clip(r) A)
    A <  0   -max(min(r A, clip(r) A), c A)
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def ppo_clip(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    ratio = torch.exp(tokens.log_ratio)
    free = ratio * tokens.advantages
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * tokens.advantages
    surrogate, clipped = torch.minimum(free, bounded), bounded < free
    if spec.dual_clip:
        floor = torch.where(tokens.advantages < 0, spec.dual_clip * tokens.advantages, -torch.inf)
        surrogate, clipped = torch.maximum(surrogate, floor), clipped | (surrogate < floor)
    return TokenLoss(loss=-surrogate, clipped=clipped)
