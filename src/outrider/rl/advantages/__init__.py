"""Advantage estimators: from one reward a rollout to one advantage a rollout.

    ESTIMATORS["grpo"](rewards, groups) -> advantages

`rewards` has shape (N,) and is finite: a rollout that is broken or was never scored is left out before, so that it
moves no sibling's baseline. `groups` names the group of each rollout; groups may have any sizes and any order. The
result has shape (N,), float32. Estimators count rollouts, never rows. Another one is one more file and a line below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from outrider.rl.advantages.group import dr_grpo, grpo, rloo
from outrider.rl.advantages.reinforce import reinforce
from outrider.types import FloatArray

Estimator = Callable[[FloatArray, Sequence[str]], FloatArray]

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}
)

__all__ = ["ESTIMATORS", "Estimator", "dr_grpo", "grpo", "reinforce", "rloo"]
