"""What every estimator asks of its input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.errors import BatchError
from outrider.rl.advantages.context import Context, Doubles, Reals, Steps
from outrider.types import BoolArray

ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Rewards are called equal up to this, relative to the largest: a few roundings of the float32 they may come in."""


def all_equal(values: Doubles) -> BoolArray:
    """Whether the values along the first axis, one at least, are the same but for rounding.

    What calls earned adds up in another order in each rollout, so that sums which are equal on paper differ in the last
    bit; dividing by a standard deviation as small would turn that bit into an advantage.
    """
    low, high = values.min(axis=0), values.max(axis=0)
    equal: BoolArray = high - low <= ROUNDING * np.maximum(abs(low), abs(high))
    return equal


def checked(rewards: Reals, groups: Sequence[str]) -> Doubles:
    """`rewards` in float64, shape (N,). Raises `BatchError` on a missing id, a wrong length or a number not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(groups),):
        raise BatchError(f"rewards have shape {values.shape} for {len(groups)} group ids; there must be one for each.")
    missing = next((index for index, group in enumerate(groups) if group is None or group == ""), None)
    if missing is not None:
        raise BatchError(f"rollout {missing} has no group id; there is no default group.")
    if not np.isfinite(values).all():
        raise BatchError("a reward is not finite; leave unscored rollouts out before estimating advantages.")
    return values


def weights(context: Context, count: int) -> Doubles:
    """How much each of `count` rollouts weighs: its trained tokens, or 1. Raises `BatchError` on a wrong length."""
    if context.lengths is None:
        return np.ones(count)
    lengths = np.asarray(context.lengths, dtype=np.float64)
    if lengths.shape != (count,) or (lengths <= 0).any():
        raise BatchError(f"lengths must be {count} numbers of trained tokens, at least 1 each.")
    return lengths


def checked_steps(context: Context, count: int) -> Steps:
    """The steps of `context`. Raises `BatchError` where there are none, or don't cover `count` rollouts in order."""
    steps = context.steps
    if steps is None:
        raise BatchError("this estimator gives credit step by step; context.steps is missing.")
    rollout = np.asarray(steps.rollout)
    if rollout.shape != np.shape(steps.rewards):
        raise BatchError(f"{len(rollout)} steps have rewards of shape {np.shape(steps.rewards)}.")
    if count and (len(rollout) == 0 or (np.unique(rollout) != np.arange(count)).any() or (np.diff(rollout) < 0).any()):
        raise BatchError(f"steps must name the rollouts 0..{count - 1} in ascending order, each at least once.")
    if not np.isfinite(steps.rewards).all():
        raise BatchError("a reward of a step is not finite.")
    return steps
