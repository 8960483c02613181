"""A curriculum by measured difficulty: tasks that are solved sometimes come more often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.types import Rollout, Task

FLOOR = 0.05
"""Weight of a task that is always or never solved: it must be met again to be seen to have changed."""
DECAY = 0.7
"""How much of the past counts at each new measurement, since the policy changes."""


class Difficulty:
    """Draws task i with weight ``FLOOR + 4 p (1 - p)``, p its rate of success so far, 1/2 before the first measurement.

    The variance p (1 - p) of a binary reward is what a group baseline can learn from; compare the learnability score of
    arXiv:2502.00089 and the online difficulty filtering of arXiv:2504.03380.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, success: float) -> None:
        self._seed, self._success = seed, success
        self._place = {task.id: place for place, task in enumerate(tasks)}
        self._solved = np.full(len(tasks), 0.5)
        self._weight = np.ones(len(tasks))  # of the prior, in groups

    def choose(self, index: int) -> int:
        rate = self._solved / self._weight
        chance = FLOOR + 4 * rate * (1 - rate)
        return int(np.random.default_rng((self._seed, index)).choice(len(chance), p=chance / chance.sum()))

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        solved = [rollout.reward >= self._success for rollout in rollouts if rollout.reward is not None]
        place = self._place.get(rollouts[0].task.id) if rollouts else None
        if place is None or not solved:
            return
        self._solved[place] = DECAY * self._solved[place] + sum(solved) / len(solved)
        self._weight[place] = DECAY * self._weight[place] + 1
