"""SAPO: a gate that closes softly as the ratio leaves 1, in place of a clip.

Gao et al. 2025, Soft Adaptive Policy Optimization, arXiv:2511.20347:

    -(4 / tau) sigmoid(tau (r - 1)) A       tau = tau_positive where A > 0, else tau_negative

At r = 1 the gradient is that of REINFORCE; it decays to both sides, faster for negative advantages, whose updates
raise many unlikely tokens at once. Meant for one sequence a row weighing the same; any normalisation may be used here.
"""

from __future__ import annotations

import torch

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens


def sapo(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    ratio = torch.exp(tokens.log_ratio)
    tau = torch.full_like(tokens.advantages, spec.tau_negative)
    tau = tau.masked_fill(tokens.advantages > 0, spec.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return TokenLoss(loss=-gate * tokens.advantages, clipped=torch.zeros_like(ratio, dtype=torch.bool))
