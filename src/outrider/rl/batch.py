"""From samples and rewards to rows that carry their credit.

Credit is given to rollouts (DESIGN.md, invariant 5): the estimator sees each rollout once, and its advantage goes to
every trained token of all its rows; where it gives credit step by step (`advantages.UNITS`), a step's advantage goes to
the tokens of that call, or to that token. A rollout without a finite reward, or without a trained token, leaves before
the baseline is taken, so that it moves no sibling.

Where an estimator compares within groups (`compares_within_groups`), a group whose advantages are all exactly 0 teaches
nothing; its rows are not computed at all. Normalisation counts the rollouts that are left. So a group without signal
changes no gradient, a step is as long when half of the tasks are solved as it was at the start, and filtering such
groups while sampling (DAPO's dynamic sampling) or here comes to the same. To the other estimators an advantage of 0 is
one like any other: a mean that left such rollouts out would take longer steps the more of them fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from outrider.errors import BatchError
from outrider.rl.advantages import Context, compares_within_groups, find_estimator
from outrider.rl.advantages.context import NOTHING_MORE
from outrider.rl.credit import NO_EVIDENCE, Credit, Evidence, evidence_on, give_credit
from outrider.rl.find import find
from outrider.rl.normalisation import CONSTANT_TOKENS, NORMALISATIONS
from outrider.types import FloatArray, Row, Sample

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
    """Rollouts that have rows."""
    tokens: int
    """Trained tokens."""
    advantages: Mapping[str, float]
    """Advantage of each rollout that counts, by rollout id; the mean over its tokens where they differ."""
    earned: tuple[float, ...]
    """What the rollouts that count were judged by as a whole: their rewards, less a KL that comes off these."""
    excluded: Counter[str]
    """Rollouts left out, by reason."""
    excluded_tokens: Counter[str]
    """Trainable tokens of these."""


def make_batch(
    samples: Sequence[Sample],
    rewards: Mapping[str, float | None],
    groups: Mapping[str, str],
    *,
    estimator: str = "grpo",
    normalisation: str = "rollout",
    context: Context = NOTHING_MORE,
    evidence: Evidence = NO_EVIDENCE,
    constant_tokens: int = CONSTANT_TOKENS,
) -> Batch:
    """Give each sample its advantages and weights.

    `rewards` and `groups` are by rollout id; a reward of None or NaN means that there is none. Rollouts that have
    neither a reward nor a sample were left out by the caller, who counts them. Of `context` the numbers are used;
    lengths and steps are read off the samples. Raises `BatchError` on a sample that contradicts itself or whose rollout
    is unknown, `ConfigError` on an unknown name.
    """
    find_estimator(estimator)  # before anything else, as a wrong name explains all that follows
    weigh = find(NORMALISATIONS, normalisation, "train.normalisation")
    tokens = _trained_tokens(samples, rewards, groups)
    counted, excluded = _counted(rewards, tokens)
    chosen = set(counted)
    at = [i for i, sample in enumerate(samples) if sample.rollout_id in chosen and sample.loss_mask.any()]
    scored = [samples[i] for i in at]
    evidence = evidence_on(evidence, samples, at)
    context = replace(context, lengths=np.array([tokens[name] for name in counted], dtype=np.float32))
    values = np.array([rewards[name] for name in counted], dtype=np.float64)
    credit = give_credit(estimator, counted, values, [groups[n] for n in counted], scored, context, evidence)

    with_signal = {groups[name] for name in credit.signal}
    compares = compares_within_groups(estimator)
    trained = {name for name in counted if groups[name] in with_signal or (with_signal and not compares)}
    excluded[NO_SIGNAL] += len(counted) - len(trained)
    unscored = tokens.total() - sum(tokens[name] for name in counted)
    without_signal = sum(tokens[name] for name in counted if name not in trained)
    kept = [i for i, sample in enumerate(scored) if sample.rollout_id in trained]
    weights = weigh(
        [scored[i].rollout_id for i in kept], [int(scored[i].loss_mask.sum()) for i in kept], constant_tokens
    )
    return Batch(
        rows=tuple(_row(scored[i], i, weight, credit, evidence) for i, weight in zip(kept, weights, strict=True)),
        groups=len({groups[name] for name in counted}),
        groups_trained=len(with_signal),
        rollouts_trained=len(trained),
        tokens=sum(tokens[name] for name in trained),
        advantages=MappingProxyType(_means(counted, tokens, scored, credit.advantages)),
        earned=tuple(credit.earned.tolist()),
        excluded=+excluded,
        excluded_tokens=+Counter({NO_REWARD: unscored, NO_SIGNAL: without_signal}),
    )


def _row(sample: Sample, number: int, weight: float, credit: Credit, evidence: Evidence) -> Row:
    """`sample` is the one with that number in `credit` and `evidence`."""
    return Row(
        sample=sample,
        advantages=credit.advantages[number],
        weights=np.where(sample.loss_mask, np.float32(weight), np.float32(0)),
        reference_logprobs=None if evidence.reference_logprobs is None else evidence.reference_logprobs[number],
        returns=None if credit.returns is None else credit.returns[number],
        old_values=None if credit.returns is None or evidence.values is None else evidence.values[number],
    )


def _counted(rewards: Mapping[str, float | None], tokens: Mapping[str, int]) -> tuple[list[str], Counter[str]]:
    """The rollouts that count, and how many do not, by reason."""
    excluded: Counter[str] = Counter()
    counted: list[str] = []
    for rollout_id, reward in rewards.items():
        if reward is None or not math.isfinite(reward):
            excluded[NO_REWARD] += rollout_id in tokens
        elif not tokens.get(rollout_id):
            excluded[NOTHING_TRAINABLE] += 1
        else:
            counted.append(rollout_id)
    return counted, excluded


def _means(
    rollouts: Sequence[str], tokens: Mapping[str, int], samples: Sequence[Sample], advantages: Sequence[FloatArray]
) -> dict[str, float]:
    total = dict.fromkeys(rollouts, 0.0)
    for sample, values in zip(samples, advantages, strict=True):
        total[sample.rollout_id] += float(values.sum(dtype=np.float64))
    return {name: value / tokens[name] for name, value in total.items()}


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
