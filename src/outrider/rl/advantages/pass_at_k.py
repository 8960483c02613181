"""Advantages for the best of several tries, where a task counts as solved if one of k is.

    pass_at_k    Chen et al. 2025, Pass@k Training, arXiv:2508.10751, the analytic form of its section 2.4
    grpo_passk   Tang et al. 2025, Inference Time Objectives, arXiv:2503.19595, in the form that verl has:
                 only the best rollout of a group has an advantage, (best - second best) / (std + 1e-6)

Of a group of n rollouts, f of them failed (reward below `context.success`), a random set of k solves the task with
probability ``p = 1 - C(f, k) / C(n, k)``, with deviation ``s = sqrt(p (1 - p))``. A rollout gets the mean advantage
``(solved - p) / s`` of the sets that it is in:

    solved itself    (1 - p) / s
    failed           (1 - p - C(f - 1, k - 1) / C(n - 1, k - 1)) / s

A set with a solved member is worth 1, so a failure that often sits in such a set is not punished: rare solutions are
pushed for, and frequent ones are not. Where p is 0 or 1 nothing can be told apart: exact zeros. `k` above the size of
the group counts as the size. Rewards between are read as solved or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt

import numpy as np

from outrider.rl.advantages.check import checked
from outrider.rl.advantages.context import NOTHING_MORE, Context, Doubles, Reals
from outrider.rl.advantages.group import EPSILON, members, per_group
from outrider.types import BoolArray


def pass_at_k(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """Reads `context.k` and `context.success`."""
    checked(rewards, groups)
    solved = np.asarray(rewards) >= context.success  # in the precision they came in: 0.7 in float32 is below 0.7
    advantages = np.zeros(len(groups))
    for indices in members(groups):
        advantages[indices] = _of_group(solved[indices], min(context.k, len(indices)))
    return advantages


def grpo_passk(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    return per_group(checked(rewards, groups), groups, _best_alone)


def _of_group(solved: BoolArray, k: int) -> Doubles:
    n, f = len(solved), int((~solved).sum())
    p = 1 - comb(f, k) / comb(n, k)
    if f in (0, n) or p in (0.0, 1.0):
        return np.zeros(n)
    s = sqrt(p * (1 - p))
    return np.where(solved, (1 - p) / s, (1 - p - comb(f - 1, k - 1) / comb(n - 1, k - 1)) / s)


def _best_alone(r: Doubles) -> Doubles:
    second, best = np.sort(r)[-2:]
    advantages = np.zeros_like(r)
    advantages[r.argmax()] = (best - second) / (r.std(ddof=1) + EPSILON)
    return advantages
