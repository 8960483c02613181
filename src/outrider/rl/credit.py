"""One array of advantages for each sample, from the estimator's one number for each rollout, call or token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.errors import BatchError
from outrider.rl.advantages import CRITICS, Context, Unit, find_estimator, unit_of
from outrider.rl.advantages.context import Doubles, Reals
from outrider.rl.advantages.reinforce import whiten
from outrider.rl.steps import Layout, StateKey, by_call, by_token, observation
from outrider.types import FloatArray, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What else is known of the rollouts' calls and tokens. Arrays come in the order of the samples, (T,) for each."""

    call_rewards: Mapping[str, Reals] = field(default_factory=dict)
    """By rollout id, one reward for each call of the attempt (`Sample.call_index`), 0 where there is none."""
    values: Sequence[FloatArray] | None = None
    """The critic's, at trained tokens."""
    penalties: Sequence[FloatArray] | None = None
    """Taken off the reward at trained tokens: `outrider.rl.kl_reward`."""
    reference_logprobs: Sequence[FloatArray] | None = None
    """Go into the rows as they are, where they are known already."""
    state: StateKey = observation
    """When two calls of a group were made in the same state."""


NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """An estimator's answer, as one array (T,) for each sample."""

    advantages: Sequence[FloatArray]
    returns: Sequence[FloatArray] | None
    earned: Doubles
    """(N,): what each rollout as a whole was judged by, its reward less the penalties."""
    signal: frozenset[str]
    """Rollouts with an advantage that is not exactly 0."""


def give_credit(
    estimator: str,
    rollouts: Sequence[str],
    rewards: Reals,
    groups: Sequence[str],
    samples: Sequence[Sample],
    context: Context,
    evidence: Evidence,
) -> Credit:
    """Estimate, and spread the answer over the tokens of `samples`.

    The N `rollouts` have `rewards` (N,) and `groups`; all `samples` are theirs and have a trained token, as has each
    rollout. Raises `BatchError` as the estimator does.
    """
    if not rollouts:
        return Credit(advantages=(), returns=None, earned=np.zeros(0), signal=frozenset())
    estimate, unit = find_estimator(estimator), unit_of(estimator)
    earned = rewards - _penalties(rollouts, samples, evidence)
    if unit == "rollout":
        estimated = dict(zip(rollouts, estimate(earned, groups, context), strict=True))
        return Credit(
            advantages=[np.where(s.loss_mask, np.float32(estimated[s.rollout_id]), np.float32(0)) for s in samples],
            returns=None,
            earned=earned,
            signal=frozenset(name for name, advantage in estimated.items() if advantage != 0.0),
        )
    layout = _layout(unit, rollouts, rewards, samples, evidence)
    estimated_steps = estimate(rewards, groups, replace(context, steps=layout.steps))
    signal = frozenset(rollouts[i] for i in layout.steps.rollout[estimated_steps != 0.0])
    returns = None
    if estimator in CRITICS:
        assert layout.steps.values is not None  # the estimator has refused to work without
        targets = estimated_steps + layout.steps.values
        returns = [layout.spread(targets, i) for i in range(len(samples))]
        share = np.bincount(np.concatenate([at[at >= 0] for at in layout.of_token]), minlength=len(targets))
        estimated_steps = whiten(estimated_steps.astype(np.float64), share.astype(np.float64))
    return Credit(
        advantages=[layout.spread(estimated_steps, i) for i in range(len(samples))],
        returns=returns,
        earned=earned,
        signal=signal,
    )


def _layout(
    unit: Unit, rollouts: Sequence[str], rewards: Reals, samples: Sequence[Sample], evidence: Evidence
) -> Layout:
    arrays = (rollouts, samples, rewards, evidence.call_rewards)
    if unit == "token":
        return by_token(*arrays, values=evidence.values, penalties=evidence.penalties)
    return by_call(*arrays, values=evidence.values, penalties=evidence.penalties, state=evidence.state)


def evidence_on(evidence: Evidence, samples: Sequence[Sample], at: Sequence[int]) -> Evidence:
    """The part of `evidence` that is about the samples at the positions `at`."""
    lengths = [len(sample.token_ids) for sample in samples]

    def part(name: str, arrays: Sequence[FloatArray] | None) -> Sequence[FloatArray] | None:
        if arrays is not None and [len(array) for array in arrays] != lengths:
            raise BatchError(f"evidence.{name} must have one array for each sample, as long as its tokens.")
        return None if arrays is None else [arrays[i] for i in at]

    return replace(
        evidence,
        values=part("values", evidence.values),
        penalties=part("penalties", evidence.penalties),
        reference_logprobs=part("reference_logprobs", evidence.reference_logprobs),
    )


def _penalties(rollouts: Sequence[str], samples: Sequence[Sample], evidence: Evidence) -> Doubles:
    """Sum of the penalties of each rollout, (N,)."""
    total = dict.fromkeys(rollouts, 0.0)
    for sample, penalty in zip(samples, evidence.penalties or (), strict=evidence.penalties is not None):
        total[sample.rollout_id] += float(penalty[sample.loss_mask].sum(dtype=np.float64))
    return np.array([total[name] for name in rollouts])
