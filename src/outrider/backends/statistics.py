"""Means over the trained tokens of all micro-batches of a `forward_backward`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.protocols import StepStats
from outrider.rl.losses import TokenLoss, Tokens, k3


@dataclass(slots=True)
class Statistics:
    """Sums so far. Nothing here carries a gradient."""

    loss: float = 0.0
    tokens: int = 0
    computed: int = 0
    largest_difference: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    @torch.no_grad()
    def add(
        self, computed: int, loss: Tensor, tokens: Tokens, policy: TokenLoss, entropy: Tensor, kl: Tensor | None
    ) -> None:
        """`computed` positions went through the model, `loss` is the micro-batch's share, the rest is one a token."""
        tokens = replace(tokens, logp=tokens.logp.detach())
        difference = (tokens.logp - tokens.behaviour_logp).abs()
        self.loss += loss.item()
        self.tokens += len(difference)
        self.computed += computed
        self.largest_difference = max(self.largest_difference, difference.max().item())
        for name, values in (
            ("ratio", torch.exp(tokens.log_ratio)),
            ("clipped", policy.clipped),
            ("entropy", entropy),
            ("kl_behaviour", k3(tokens.behaviour_logp, tokens.logp)),  # the tokens were sampled from the behaviour
            ("kl_reference", kl),
            ("difference", difference),
        ):
            if values is not None:
                self.sums[name] = self.sums.get(name, 0.0) + values.sum().item()

    def result(self) -> StepStats:
        mean = {name: total / self.tokens for name, total in self.sums.items()}
        return StepStats(
            loss=self.loss,
            tokens=self.tokens,
            tokens_computed=self.computed,
            ratio_mean=mean.get("ratio", 1.0),
            clip_fraction=mean.get("clipped", 0.0),
            entropy=mean.get("entropy", 0.0),
            kl_behaviour=mean.get("kl_behaviour", 0.0),
            kl_reference=mean.get("kl_reference", 0.0),
            logprob_diff_mean=mean.get("difference", 0.0),
            logprob_diff_max=self.largest_difference,
        )
