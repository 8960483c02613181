"""The KL to the reference as a part of the reward, in place of a term in the loss.

Ouyang et al. 2022, arXiv:2203.02155: a token earns ``- kl_coef * kl(token)`` beside what the task pays, with the KL of
the policy before the update. An estimator that gives credit step by step discounts it like any reward; for one that
gives a rollout one number, it is summed over the rollout. The usual estimate is k1: it is the one whose policy gradient
is that of the KL. With k3 the reward has the right expectation and another gradient, with k2 neither is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.rl.losses import KL
from outrider.types import FloatArray, Sample


def kl_penalties(
    samples: Sequence[Sample], old: Sequence[FloatArray], reference: Sequence[FloatArray], coef: float, kl: str = "k1"
) -> list[FloatArray]:
    """What each trained token loses, (T,) for each sample, 0 elsewhere. `old` and `reference` are log-probs, (T,)."""
    penalties = []
    for sample, of_old, of_reference in zip(samples, old, reference, strict=True):
        estimate = KL[kl](torch.from_numpy(of_old).double(), torch.from_numpy(of_reference).double()).numpy()
        penalties.append(np.where(sample.loss_mask, coef * estimate, 0.0).astype(np.float32))
    return penalties
