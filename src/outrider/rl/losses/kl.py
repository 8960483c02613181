"""Estimates of KL(policy || reference) from tokens that the policy sampled, one a token.

Schulman 2020, Approximating KL Divergence, joschu.net/blog/kl-approx.html. With d = log reference - log policy:

    k1   -d             unbiased, noisy, can be negative
    k2   d**2 / 2       biased, low noise; its gradient is that of the KL itself
    k3   exp(d) - 1 - d unbiased, low noise, never negative; the usual one in a loss
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    return (reference - logp).square() / 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    difference = reference - logp
    return torch.expm1(difference) - difference
