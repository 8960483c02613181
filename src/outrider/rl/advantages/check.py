"""What every estimator asks of its input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from outrider.errors import BatchError
from outrider.types import FloatArray


def checked(rewards: FloatArray, groups: Sequence[str]) -> npt.NDArray[np.float64]:
    """`rewards` in float64, shape (N,). Raises `BatchError` on a missing id, a wrong length or a number not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(groups),):
        raise BatchError(f"rewards have shape {values.shape} for {len(groups)} group ids; there must be one for each.")
    if not all(groups):
        raise BatchError(f"rollout {list(groups).index('')} has no group id; there is no default group.")
    if not np.isfinite(values).all():
        raise BatchError("a reward is not finite; leave unscored rollouts out before estimating advantages.")
    return values
