"""Estimates of KL(policy || reference) from tokens that the policy sampled, one a token.

Schulman 2020, Approximating KL Divergence, joschu.net/blog/kl-approx.html. With d = log reference - log policy:

    k1   -d             unbiased, noisy, can be negative
    k2   d**2 / 2       biased, low noise; its gradient is that of the KL itself
    k3   exp(d) - 1 - d unbiased, low noise, never negative; the usual one in a loss

In a reward (`outrider.rl.kl_reward`) k1 is the one whose policy gradient is that of the KL; in a loss that is k2. The
gradient of k1 in a loss is 0 in expectation: it holds nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

LIMIT = 20.0
"""k3 takes no d beyond this; its exponential would hide every other token."""


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    return (reference - logp).square() / 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    difference = (reference - logp).clamp(-LIMIT, LIMIT)
    return torch.expm1(difference) - difference


KL: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
