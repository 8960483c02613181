"""Baselines from the group: a rollout is compared with the others of its task.

With r the rewards of a group of n rollouts, l their lengths in trained tokens:

    grpo      (r - mean(r)) / (std(r) + 1e-6)     Shao et al. 2024, DeepSeekMath, arXiv:2402.03300
    dr_grpo    r - mean(r)                        Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783
    rloo       r - mean(r of the others)          Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740
    opo        r - sum(l r) / sum(l)              Hao et al. 2025, On-Policy RL with Optimal Baseline, arXiv:2505.23585
    gpg        r - mean(r)                        Chu et al. 2025, Group Policy Gradient, arXiv:2504.02546

`grpo` takes the sample standard deviation (n - 1), as verl and TRL do; the paper leaves it open. Dr. GRPO drops it,
since it lifts tasks that are nearly solved or nearly hopeless. Leave-one-out makes the baseline independent of the
rollout that it judges, hence unbiased; it equals dr_grpo times n / (n - 1). Its deviation must not be taken over the
others too: where they agree it vanishes, and the odd one out gets an advantage of a million.

GPG also leaves groups without signal out and multiplies by (all rollouts / those left). Here `make_batch` does that
for every estimator: it drops such groups, and the normalisation counts what is left. So the two are one formula.

A group of one, or of equal rewards, gives exact zeros. Rounding must not decide that (`check.all_equal`): with
r = 0.1, 0.1, 0.1 the mean is off by one bit, and dividing by a standard deviation as small would turn the bit into an
advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.rl.advantages.check import all_equal, checked, weights
from outrider.rl.advantages.context import NOTHING_MORE, Context, Doubles, Reals

EPSILON = 1e-6


def grpo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return per_group(checked(rewards, groups), groups, standard)


def dr_grpo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return per_group(checked(rewards, groups), groups, lambda r: r - r.mean())


def rloo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return per_group(checked(rewards, groups), groups, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def opo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """Reads `context.lengths`: long rollouts have larger gradients, so they count more in the baseline of least
    variance."""
    values, lengths = checked(rewards, groups), weights(context, len(groups))
    return per_group(values, groups, lambda r, w: r - (w * r).sum() / w.sum(), lengths)


def gpg(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return dr_grpo(rewards, groups)


def standard(r: Doubles) -> Doubles:
    """GRPO's formula."""
    standardised: Doubles = (r - r.mean()) / (r.std(ddof=1) + EPSILON)
    return standardised


def per_group(values: Doubles, groups: Sequence[str], formula: Callable[..., Doubles], *more: Doubles) -> Doubles:
    """Apply `formula` to the values of each group that has two different ones; the others stay 0.

    `more` are arrays of the same shape (N,), of which the formula gets the group's part too.
    """
    advantages = np.zeros_like(values)
    for indices in members(groups):
        r = values[indices]
        if not all_equal(r):
            advantages[indices] = formula(r, *(array[indices] for array in more))
    return advantages


def members(groups: Sequence[str]) -> list[list[int]]:
    """The positions of each group's members."""
    found: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return list(found.values())
