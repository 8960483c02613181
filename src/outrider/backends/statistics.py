"""Means over the trained tokens of all micro-batches of a `forward_backward`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.backends.language_model import Scores
from outrider.backends.packing import Pack
from outrider.backends.rows import LossInputs
from outrider.backends.terms import LossTerms
from outrider.protocols import StepStats
from outrider.rl.losses import k3


@dataclass(slots=True)
class Statistics:
    """Sums so far. Nothing here carries a gradient."""

    loss: float = 0.0
    tokens: int = 0
    computed: int = 0
    recomputed: int = 0
    largest_difference: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, pack: Pack, scores: Scores, given: LossInputs, terms: LossTerms) -> None:
        """Take in one micro-batch: what went through the model, and one number for each of its trained tokens."""
        tokens = replace(given.tokens, logp=scores.logp.detach())
        difference = (tokens.logp - tokens.behaviour_logp).abs()
        self.loss += terms.total.item()
        self.tokens += len(difference)
        self.computed += pack.size
        self.recomputed += pack.recomputed
        self.largest_difference = max(self.largest_difference, difference.max().item())
        self._sum("ratio", torch.exp(tokens.log_ratio))
        self._sum("clipped", terms.policy.clipped)
        self._sum("entropy", scores.entropy)
        self._sum("kl_behaviour", k3(tokens.behaviour_logp, tokens.logp))  # the tokens were sampled from the behaviour
        self._sum("difference", difference)
        if terms.kl is not None:
            self._sum("kl_reference", terms.kl)
        if terms.critic is not None and scores.values is not None and given.returns is not None:
            error = (given.returns - scores.values).double()
            self._sum("critic", terms.critic.loss)
            self._sum("error", error)
            self._sum("error squared", error.square())
            self._sum("return", given.returns.double())
            self._sum("return squared", given.returns.double().square())

    def result(self) -> StepStats:
        mean = {name: total / self.tokens for name, total in self.sums.items()}
        return StepStats(
            loss=self.loss,
            tokens=self.tokens,
            tokens_computed=self.computed,
            tokens_recomputed=self.recomputed,
            ratio_mean=mean.get("ratio", 1.0),
            clip_fraction=mean.get("clipped", 0.0),
            entropy=mean.get("entropy", 0.0),
            kl_behaviour=mean.get("kl_behaviour", 0.0),
            kl_reference=mean.get("kl_reference", 0.0),
            logprob_diff_mean=mean.get("difference", 0.0),
            logprob_diff_max=self.largest_difference,
            value_loss=mean.get("critic"),
            value_explained_variance=_explained(mean),
        )

    def _sum(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + values.sum().item()


def _explained(mean: dict[str, float]) -> float | None:
    """``1 - var(returns - values) / var(returns)``; 0 where all returns are equal."""
    if "critic" not in mean:
        return None
    variance = mean["return squared"] - mean["return"] ** 2
    if variance < 1e-12:
        return 0.0
    return 1 - (mean["error squared"] - mean["error"] ** 2) / variance
