"""From samples and rewards to rows that carry their credit.

Credit is given to rollouts (DESIGN.md, invariant 5): the estimator sees each rollout once, and its advantage goes to
every trained token of all its rows. A rollout without a finite reward, or without a trained token, leaves before the
baseline is taken, so that it moves no sibling. Groups whose advantages are all exactly 0 teach nothing; their rows are
not computed at all.

Normalisation counts the rollouts that are left after that. So a group without signal changes no gradient, a step is as
long when half of the tasks are solved as it was at the start, and filtering such groups while sampling (DAPO's dynamic
sampling) or here comes to the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from outrider.errors import BatchError, ConfigError
from outrider.rl.advantages import ESTIMATORS
from outrider.rl.normalisation import NORMALISATIONS
from outrider.types import FloatArray, Row, Sample

_T = TypeVar("_T")

NO_REWARD = "rollout: no reward"
NOTHING_TRAINABLE = "rollout: nothing trainable"
NO_SIGNAL = "rollout: group without signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows ready for a backend, and what became of the rollouts."""

    rows: tuple[Row, ...]
    groups: int
    """Groups with at least one rollout that counts."""
    groups_trained: int
    """Of these, groups whose advantages are not all 0."""
    rollouts_trained: int
    tokens: int
    """Trained tokens."""
    advantages: Mapping[str, float]
    """Advantage of each rollout that counts, by rollout id."""
    excluded: Counter[str]
    """Rollouts left out, by reason."""

    def with_reference(self, logprobs: Sequence[FloatArray]) -> tuple[Row, ...]:
        """The rows with reference log-probs, one array of the sample's length for each row."""
        return tuple(replace(row, reference_logprobs=values) for row, values in zip(self.rows, logprobs, strict=True))


def make_batch(
    samples: Sequence[Sample],
    rewards: Mapping[str, float | None],
    groups: Mapping[str, str],
    *,
    estimator: str = "grpo",
    normalisation: str = "rollout",
) -> Batch:
    """Give each sample its advantages and weights.

    `rewards` and `groups` are by rollout id; a reward of None or NaN means that there is none. Rollouts that have
    neither a reward nor a sample were left out by the caller, who counts them. Raises `BatchError` on a sample that
    contradicts itself or whose rollout is unknown, `ConfigError` on an unknown name.
    """
    estimate = _named(ESTIMATORS, estimator, "train.advantage")
    weigh = _named(NORMALISATIONS, normalisation, "train.normalisation")
    tokens = _trained_tokens(samples, rewards, groups)
    excluded: Counter[str] = Counter()
    counted: list[str] = []
    for rollout_id, reward in rewards.items():
        if reward is None or not math.isfinite(reward):
            excluded[NO_REWARD] += rollout_id in tokens
        elif not tokens.get(rollout_id):
            excluded[NOTHING_TRAINABLE] += 1
        else:
            counted.append(rollout_id)

    values = np.array([rewards[rollout_id] for rollout_id in counted], dtype=np.float64)
    estimated = estimate(values.astype(np.float32), [groups[rollout_id] for rollout_id in counted])
    advantages = dict(zip(counted, estimated.tolist(), strict=True))
    with_signal = {groups[rollout_id] for rollout_id, advantage in advantages.items() if advantage != 0.0}
    trained = {rollout_id for rollout_id in counted if groups[rollout_id] in with_signal}
    excluded[NO_SIGNAL] += len(counted) - len(trained)

    kept = [sample for sample in samples if sample.rollout_id in trained and sample.loss_mask.any()]
    weights = weigh([sample.rollout_id for sample in kept], [int(sample.loss_mask.sum()) for sample in kept])
    return Batch(
        rows=tuple(
            Row(
                sample=sample,
                advantages=np.where(sample.loss_mask, np.float32(advantages[sample.rollout_id]), np.float32(0)),
                weights=np.where(sample.loss_mask, np.float32(weight), np.float32(0)),
            )
            for sample, weight in zip(kept, weights, strict=True)
        ),
        groups=len({groups[rollout_id] for rollout_id in counted}),
        groups_trained=len(with_signal),
        rollouts_trained=len(trained),
        tokens=sum(tokens[rollout_id] for rollout_id in trained),
        advantages=MappingProxyType(advantages),
        excluded=+excluded,
    )


def _trained_tokens(
    samples: Sequence[Sample], rewards: Mapping[str, float | None], groups: Mapping[str, str]
) -> Counter[str]:
    """Trained tokens of each rollout that has a sample; checks every sample on the way."""
    if set(rewards) != set(groups):
        odd = sorted(set(rewards) ^ set(groups))[0]
        raise BatchError(f"rollout {odd!r} has a reward but no group, or a group but no reward entry.")
    tokens: Counter[str] = Counter()
    for sample in samples:
        name = sample.rollout_id
        if name not in rewards:
            raise BatchError(f"a sample belongs to rollout {name!r}, for which no reward entry was given.")
        if sample.group_id != groups[name]:
            raise BatchError(f"rollout {name!r} is in group {groups[name]!r}, but a sample says {sample.group_id!r}.")
        lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs)}
        if len(lengths) != 1:
            raise BatchError(f"rollout {name!r}: ids, mask and log-probs of a sample differ in length: {lengths}.")
        if sample.loss_mask[:1].any():
            raise BatchError(f"rollout {name!r}: the first token of a sample cannot be trained, it has no context.")
        if not np.isfinite(sample.logprobs[sample.loss_mask]).all():
            raise BatchError(f"rollout {name!r}: a behaviour log-prob is not finite.")
        tokens[name] += int(sample.loss_mask.sum())
    return tokens


def _named(table: Mapping[str, _T], name: str, field: str) -> _T:
    if name not in table:
        raise ConfigError(f"{field}: there is no {name!r}. Known: {', '.join(sorted(table))}.")
    return table[name]
