"""Baselines from the group: a rollout is compared with the others of its task.

With r the rewards of a group of n rollouts:

    grpo      (r - mean(r)) / (std(r) + 1e-6)     Shao et al. 2024, DeepSeekMath, arXiv:2402.03300
    dr_grpo    r - mean(r)                        Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783
    rloo       r - mean(r of the others)          Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740

`grpo` takes the sample standard deviation (n - 1), as verl and TRL do; the paper leaves it open. Dr. GRPO drops it,
since it lifts tasks that are nearly solved or nearly hopeless. Leave-one-out makes the baseline independent of the
rollout that it judges, hence unbiased; it equals dr_grpo times n / (n - 1).

A group of one, or of equal rewards, gives exact zeros. Rounding must not decide that: with r = 0.1, 0.1, 0.1 the mean
is off by one bit, and dividing by a standard deviation as small would turn the bit into an advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from outrider.rl.advantages.check import checked
from outrider.types import FloatArray

_Doubles = npt.NDArray[np.float64]

EPSILON = 1e-6


def grpo(rewards: FloatArray, groups: Sequence[str]) -> FloatArray:
    return _per_group(rewards, groups, lambda r: (r - r.mean()) / (r.std(ddof=1) + EPSILON))


def dr_grpo(rewards: FloatArray, groups: Sequence[str]) -> FloatArray:
    return _per_group(rewards, groups, lambda r: r - r.mean())


def rloo(rewards: FloatArray, groups: Sequence[str]) -> FloatArray:
    return _per_group(rewards, groups, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def _per_group(rewards: FloatArray, groups: Sequence[str], formula: Callable[[_Doubles], _Doubles]) -> FloatArray:
    """Apply `formula` to the rewards of each group that has two different ones; the others stay 0."""
    values = checked(rewards, groups)
    advantages = np.zeros_like(values)
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    for indices in members.values():
        r = values[indices]
        if r.min() != r.max():
            advantages[indices] = formula(r)
    return advantages.astype(np.float32)
