"""What estimators may want beside rewards and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Reals = npt.NDArray[np.floating[Any]]
"""float32 or float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The S steps of N rollouts, those of one rollout side by side and in order. A step is a call, or a token."""

    rollout: Index
    """(S,): which rollout a step belongs to, ascending from 0; each of the N has one at least."""
    rewards: Reals
    """(S,): what each step earned. A rollout's own reward is counted at its last step."""
    states: Sequence[str] = ()
    """S keys, where states are compared: equal keys within a group are the same state. An empty key equals none."""
    values: Reals | None = None
    """(S,): a critic's estimate of the return from the state in which each step was taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Each estimator's docstring says which of these it reads. The numbers are options of a run (`train.*`)."""

    lengths: Reals | None = None
    """(N,): trained tokens of each rollout; None counts 1 for each."""
    running: float | None = None
    """Mean reward of earlier batches; None in the first."""
    steps: Steps | None = None
    success: float = 1.0
    """Reward from which on a rollout counts as solved."""
    k: int = 4
    """Tries of pass@k."""
    gamma: float = 1.0
    """Discount for each step."""
    lam: float = 1.0
    """GAE's lambda."""
    step_weight: float = 1.0
    """Weight of GiGPO's comparison between steps, beside that between rollouts."""


NOTHING_MORE = Context()


class Estimator(Protocol):
    """From rewards (N,) and N group ids to advantages: (N,), or (S,) where credit is given step by step."""

    def __call__(self, rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE, /) -> Reals: ...
