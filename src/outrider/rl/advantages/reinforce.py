"""REINFORCE, and baselines that need no group: of use where a task is rolled out once.

    reinforce                 r                           Williams 1992
    reinforce_running         r - mean of earlier rewards Williams 1992, "reinforcement comparison"
    reinforce_pp              whiten(r)                   Hu et al. 2025, REINFORCE++, arXiv:2501.03262
    reinforce_pp_baseline     whiten(r - mean of group)   the same, section on group sampling

``whiten(x) = (x - mean) / sqrt(variance + 1e-8)`` over the whole batch, in which a rollout counts as many times as it
has trained tokens, since the paper's batch is one of tokens; without `context.lengths` each counts once. However many
rows hold those tokens does not matter. The paper's KL penalty is an option of its own (`train.kl_in = "reward"`).

A batch of equal rewards gives exact zeros in the last two. `reinforce_pp_baseline` departs from the paper in one thing:
groups without signal, which are 0 before whitening, stay 0 and stay out of its mean and variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.rl.advantages.check import all_equal, checked, weights
from outrider.rl.advantages.context import NOTHING_MORE, Context, Doubles, Reals
from outrider.rl.advantages.group import members

VARIANCE_EPSILON = 1e-8


def reinforce(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return checked(rewards, groups)


def reinforce_running(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """Reads `context.running`; in the first batch its own mean stands in."""
    values = checked(rewards, groups)
    if not len(values):
        return values
    baseline = values.mean() if context.running is None else context.running
    return values - baseline


def reinforce_pp(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """Reads `context.lengths`."""
    values = checked(rewards, groups)
    return whiten(values, weights(context, len(values)))


def reinforce_pp_baseline(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """Reads `context.lengths`."""
    values, lengths = checked(rewards, groups), weights(context, len(groups))
    live = np.zeros(len(values), dtype=bool)
    for indices in members(groups):
        live[indices] = not all_equal(values[indices])
        values[indices] -= values[indices].mean()
    advantages = np.zeros_like(values)
    advantages[live] = whiten(values[live], lengths[live])
    return advantages


def whiten(values: Doubles, weight: Doubles) -> Doubles:
    """Mean 0 and variance 1, each value counted `weight` times; both (N,). Equal values give exact zeros.

    The variance is the unbiased one, with (sum of weights - 1), as in verl.
    """
    if not len(values) or all_equal(values):
        return np.zeros_like(values)
    total = weight.sum()
    mean = (weight * values).sum() / total
    variance = (weight * (values - mean) ** 2).sum() / (total - 1)
    whitened: Doubles = (values - mean) / np.sqrt(variance + VARIANCE_EPSILON)
    return whitened


@dataclass(frozen=True, slots=True)
class RunningMean:
    """An exponential mean of batch means, without bias towards its start (Kingma & Ba 2014, section 3).

    It is a value, not an object with a memory: a run keeps it, hands `mean` to the estimator, and keeps `after`.
    """

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def after(self, rewards: Sequence[float], decay: float = 0.9) -> RunningMean:
        """The mean once `rewards`, a batch's, are in it. An empty batch changes nothing."""
        if not len(rewards):
            return self
        keep = 1 - decay
        return RunningMean(decay * self.total + keep * float(np.mean(rewards)), decay * self.weight + keep)
