"""Every task once an epoch, in an order that the seed gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.types import Rollout, Task


class Shuffle:
    """A new order each epoch, without replacement. A function of the seed and the group's number alone."""

    def __init__(self, tasks: Sequence[Task], *, seed: int, success: float) -> None:
        self._count, self._seed = len(tasks), seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def choose(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return int(self._order[place])

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing to learn."""
