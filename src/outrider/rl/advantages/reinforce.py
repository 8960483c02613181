"""REINFORCE without a baseline: the reward is the advantage.

Williams 1992, Simple statistical gradient-following algorithms for connectionist reinforcement learning.
Unbiased and noisy; of use where a task is rolled out once, or where rewards are already centred.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.rl.advantages.check import checked
from outrider.types import FloatArray


def reinforce(rewards: FloatArray, groups: Sequence[str]) -> FloatArray:
    return checked(rewards, groups).astype(np.float32)
