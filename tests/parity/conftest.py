"""Random ragged batches, and whether the references are here at all.

These tests need verl and TRL, which `make parity` puts into an environment of their own. Elsewhere there is nothing to
collect; `make parity` fails when nothing is.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from outrider.rl.batch import Batch, make_batch
from outrider.types import Row, Sample

collect_ignore_glob = [] if importlib.util.find_spec("verl") else ["test_*.py"]


@dataclass(frozen=True)
class Ragged:
    """N rollouts in groups of different sizes, each one row of different length, padded to (N, T).

    All numbers are float64 and fit into float32: both sides are given the same numbers, whatever they hold them in, and
    a reference that is told float64 reckons in it.
    """

    rewards: torch.Tensor
    """(N,)"""
    groups: list[str]
    mask: torch.Tensor
    """(N, T): 1 at trained tokens; turns of other speakers lie between them."""
    behaviour: torch.Tensor
    old: torch.Tensor
    logp: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    """(N, T), one number for each rollout."""

    @property
    def token_rewards(self) -> torch.Tensor:
        """(N, T): the reward at the last trained token."""
        places = torch.zeros_like(self.mask)
        for row, mask in enumerate(self.mask):
            places[row, int(mask.nonzero().max())] = self.rewards[row]
        return places

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(1).numpy().astype(np.float32)

    def padded(self, values: torch.Tensor) -> list[np.ndarray]:
        """Rows of `values` (N, T) as a sample has them, (1 + T,) each: before the first token comes one of context."""
        return [np.array([0.0, *row], dtype=np.float32) for row in values.tolist()]

    def samples(self) -> list[Sample]:
        """One for each rollout, r0 to r(N - 1)."""
        made = []
        for number, logprobs in enumerate(self.padded(self.behaviour * self.mask)):
            mask = np.array([False, *self.mask[number].bool().tolist()])
            made.append(
                Sample(
                    rollout_id=f"r{number}",
                    group_id=self.groups[number],
                    attempt_id="a",
                    token_ids=np.zeros(len(mask), np.int32),
                    loss_mask=mask,
                    logprobs=logprobs,
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    call_index=np.where(mask, 0, -1).astype(np.int32),
                )
            )
        return made

    def rows(self) -> list[Row]:
        """Each trained token with an advantage and a weight of 1."""
        made = []
        for sample, old in zip(self.samples(), self.padded(self.old), strict=True):
            ones = sample.loss_mask.astype(np.float32)
            made.append(Row(sample=sample, advantages=ones, weights=ones, old_logprobs=old))
        return made

    def made(self, estimator: str, **more) -> Batch:
        """The way a run takes; rewards that are NaN are missing."""
        names = [f"r{number}" for number in range(len(self.groups))]
        rewards = dict(zip(names, self.rewards.tolist(), strict=True))
        groups = dict(zip(names, self.groups, strict=True))
        return make_batch(self.samples(), rewards, groups, estimator=estimator, **more)

    @property
    def index(self) -> np.ndarray:
        return np.array(self.groups, dtype=object)


def ragged(seed: int, *, binary: bool = False, spread: float = 0.3) -> Ragged:
    rng = np.random.default_rng(seed)
    groups = [name for name, size in zip("abcd", rng.integers(2, 6, 4), strict=True) for _ in range(size)]
    order = rng.permutation(len(groups))
    groups = [groups[i] for i in order]
    count, longest = len(groups), 14
    mask = np.zeros((count, longest))
    for row in range(count):
        mask[row, : rng.integers(1, longest + 1)] = 1
        mask[row, 1:-1] *= rng.random(longest - 2) < 0.8
    rewards = rng.integers(0, 2, count).astype(np.float64) if binary else rng.normal(size=count)
    for name in set(groups):  # every group has signal: what a group without it gets is tested elsewhere
        mine = [i for i, group in enumerate(groups) if group == name]
        rewards[mine[0]], rewards[mine[1]] = 0.0, 1.0
    behaviour = -rng.uniform(0.05, 3, (count, longest))
    old = np.minimum(behaviour + rng.normal(0, spread, behaviour.shape), -0.01)
    logp = np.minimum(old + rng.normal(0, spread, behaviour.shape), -0.01)
    reference = np.minimum(logp + rng.normal(0, spread, behaviour.shape), -0.01)
    advantages = np.repeat(rng.normal(size=(count, 1)), longest, axis=1) * mask
    arrays = (rewards, mask, behaviour, old, logp, reference, advantages)
    tensors = [torch.from_numpy(array.astype(np.float32).astype(np.float64)) for array in arrays]
    return Ragged(tensors[0], groups, *tensors[1:])


@pytest.fixture(params=range(5))
def batch(request) -> Ragged:
    return ragged(request.param)


@pytest.fixture(params=range(5))
def solved_or_not(request) -> Ragged:
    return ragged(request.param, binary=True)


@pytest.fixture(params=range(5))
def far_off(request) -> Ragged:
    """Log-probs so far apart that every bound is met."""
    return ragged(request.param, spread=1.5)


@pytest.fixture
def long_rollouts() -> Ragged:
    """Four of 1,000 trained tokens, with log-probs as near as engine and trainer have them."""
    rng = np.random.default_rng(0)
    behaviour = torch.from_numpy(-rng.uniform(0.05, 3, (4, 1000))).float().double()
    old = (behaviour + torch.from_numpy(rng.normal(0, 0.02, (4, 1000)))).clamp(max=-0.01).float().double()
    ones = torch.ones_like(old)
    return Ragged(ones[:, 0], list("aabb"), ones, behaviour, old, old, old, ones)
