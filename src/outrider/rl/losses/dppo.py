"""DPPO: a token is left out once its probability, not its ratio, has moved too far.

Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879. A ratio bound is tight on
unlikely tokens, where a small change of probability doubles the ratio, and loose on likely ones. DPPO bounds a
divergence of the two-way choice "this token or another", p against q = the old probability:

    dppo_tv   |p - q|
    dppo_kl   q log(q / p) + (1 - q) log((1 - q) / (1 - p))

A token beyond ``spec.divergence`` whose advantage pushes it further away has no gradient; all others have that of
REINFORCE times the ratio, which is cut at `RATIO_LIMIT` for safety and carries no gradient itself (section 5.4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.protocols import LossSpec
from outrider.rl.losses.tokens import TokenLoss, Tokens

RATIO_LIMIT = 20.0
_TINY = 1e-8


def dppo_tv(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    p, q = _probabilities(tokens)
    return _masked(tokens, p, q, (p - q).abs(), spec)


def dppo_kl(tokens: Tokens, spec: LossSpec) -> TokenLoss:
    p, q = _probabilities(tokens)
    divergence = -q * tokens.log_ratio.detach() + (1 - q) * torch.log((1 - q + _TINY) / (1 - p + _TINY))
    return _masked(tokens, p, q, divergence, spec)


def _probabilities(tokens: Tokens) -> tuple[Tensor, Tensor]:
    old = tokens.behaviour_logp if tokens.old_logp is None else tokens.old_logp
    return torch.exp(tokens.logp.detach()), torch.exp(old)


def _masked(tokens: Tokens, p: Tensor, q: Tensor, divergence: Tensor, spec: LossSpec) -> TokenLoss:
    away = torch.where(tokens.advantages > 0, p > q, p < q)
    out = away & (divergence > spec.divergence)
    ratio = torch.exp(tokens.log_ratio.detach()).clamp(max=RATIO_LIMIT)
    loss = -tokens.advantages * ratio * tokens.logp
    return TokenLoss(loss=loss.masked_fill(out, 0), clipped=out)
