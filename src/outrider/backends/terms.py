"""The loss of a micro-batch, put together from its terms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.backends.language_model import Scores
from outrider.backends.rows import LossInputs
from outrider.protocols import LossSpec
from outrider.rl.losses import KL, TokenLoss, find_loss, value_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """``total = sum(weights * (policy + kl_coef * kl - entropy_coef * entropy + value_coef * critic))``, a scalar."""

    total: Tensor
    policy: TokenLoss
    kl: Tensor | None
    """(M,): the KL to the reference policy."""
    critic: TokenLoss | None


def loss_terms(scores: Scores, given: LossInputs, spec: LossSpec) -> LossTerms:
    """All terms that `spec` asks for and `given` has the numbers for."""
    policy = find_loss(spec.name)(given.tokens, spec)
    total = (given.weights * policy.loss).sum()
    kl = None
    if given.reference_logp is not None:
        kl = KL[spec.kl](scores.logp, given.reference_logp)
        if spec.kl_coef:
            total = total + spec.kl_coef * (given.weights * kl).sum()
    if spec.entropy_coef:
        total = total - spec.entropy_coef * (given.weights * scores.entropy).sum()
    critic = None
    if given.returns is not None and scores.values is not None:
        critic = value_loss(scores.values, given.returns, given.old_values, spec)
        total = total + spec.value_coef * (given.weights * critic.loss).sum()
    return LossTerms(total=total, policy=policy, kl=kl, critic=critic)
