"""What the loss is averaged over: one weight for each row, put on each of its trained tokens.

The loss of a batch is the sum over trained tokens of ``weight * loss``. With N rollouts, R rows, n(i) the trained
tokens of rollout i over all its rows and m(j) those of row j:

    rollout    1 / (N n(i))       each rollout weighs the same, however many rows or tokens it has; the default
    token      1 / sum n          each token weighs the same: long rollouts weigh more. DAPO, arXiv:2503.14476
    sequence   1 / (R m(j))       each row weighs the same: GRPO as published, where a rollout was one row
    constant   1 / (N L)          L a constant: no preference for short answers. Dr. GRPO, arXiv:2503.20783

All but `sequence` give the same gradient when a rollout is split into more rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

_Doubles = npt.NDArray[np.float64]

CONSTANT_TOKENS = 1024
"""L of `constant` where none is given. It only scales the gradient: it acts on the learning rate and on clipping."""


class Normalisation(Protocol):
    """From each row's rollout and its trained tokens, at least 1, both (R,), to its weight, (R,)."""

    def __call__(
        self, rollouts: Sequence[str], tokens: Sequence[int], length: int = CONSTANT_TOKENS, /
    ) -> _Doubles: ...


def rollout(rollouts: Sequence[str], tokens: Sequence[int], length: int = CONSTANT_TOKENS) -> _Doubles:
    total: Counter[str] = Counter()
    for name, count in zip(rollouts, tokens, strict=True):
        total[name] += count
    return np.array([1.0 / (len(total) * total[name]) for name in rollouts])


def token(rollouts: Sequence[str], tokens: Sequence[int], length: int = CONSTANT_TOKENS) -> _Doubles:
    return np.full(len(rollouts), 1.0 / max(1, sum(tokens)))


def sequence(rollouts: Sequence[str], tokens: Sequence[int], length: int = CONSTANT_TOKENS) -> _Doubles:
    return np.array([1.0 / (len(tokens) * count) for count in tokens])


def constant(rollouts: Sequence[str], tokens: Sequence[int], length: int = CONSTANT_TOKENS) -> _Doubles:
    """`length` is L."""
    return np.full(len(rollouts), 1.0 / (max(1, len(set(rollouts))) * length))


NORMALISATIONS: Mapping[str, Normalisation] = MappingProxyType(
    {"rollout": rollout, "token": token, "sequence": sequence, "constant": constant}
)
