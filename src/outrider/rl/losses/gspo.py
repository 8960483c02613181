"""GSPO: one importance ratio for a whole row, the geometric mean over its tokens.

Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, in the token form of its section 4.3:
the value of each token's ratio is the row's, the gradient flows through that token's own log-prob. Averaged over a row
it is the sequence objective. The ratios are close to 1, so the bounds are too: the paper uses 3e-4 and 4e-4.
A row is the sequence here; a rollout that is cut into two rows has two ratios.
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def gspo(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    row_log_ratio = tokens.row_mean(tokens.log_ratio.detach())
    ratio = torch.exp(row_log_ratio + tokens.logp - tokens.logp.detach())
    free = ratio * tokens.advantages
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * tokens.advantages
    return TokenLoss(loss=-torch.minimum(free, bounded), clipped=bounded < free)
