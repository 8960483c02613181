"""The steps of rollouts, read off their samples: what estimators that give credit step by step work on.

A step is a call, or a single token. Only steps with trained tokens count: a reward of any other call (a title that was
kept out, an answer that was cut off) is credited to the trained call before it, and to nothing where there is none,
since no action of ours led to it. A rollout's own reward is added at its last step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from outrider.errors import BatchError
from outrider.rl.advantages import Steps
from outrider.rl.advantages.context import Doubles, Index, Reals
from outrider.rl.advantages.steps import last_steps
from outrider.rl.find import find
from outrider.types import FloatArray, Sample

StateKey = Callable[[Sample, int], str]
"""From a sample, and the position of the first sampled token of one of its calls, to the key of that call's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Steps, and where in the samples they are."""

    steps: Steps
    of_token: tuple[Index, ...]
    """For each sample (T,): the step of a trained token, -1 elsewhere."""

    def spread(self, values: Reals, sample: int) -> FloatArray:
        """One value a step, (S,), as one a token of the sample with that number, (T,); 0 where no step is."""
        at = self.of_token[sample]
        return np.where(at >= 0, np.asarray(values, dtype=np.float32)[at], np.float32(0))


def observation(sample: Sample, first: int) -> str:
    """The tokens that are new since the model last spoke: what the call was asked. Equal ones are one state.

    An agent that sees its whole situation in each observation needs no more; where the past matters, use `context`.
    """
    spoken = np.flatnonzero(sample.loss_mask[:first])
    return _digest(sample, int(spoken[-1]) + 1 if len(spoken) else 0, first)


def context(sample: Sample, first: int) -> str:
    """All tokens before the call's answer: states are equal only where the whole past is."""
    return _digest(sample, 0, first)


STATES: Mapping[str, StateKey] = MappingProxyType({"observation": observation, "context": context})


def find_state(name: str) -> StateKey:
    """By name or as ``module:function``. Raises `ConfigError`."""
    return find(STATES, name, "train.gigpo_state")


def by_call(
    rollouts: Sequence[str],
    samples: Sequence[Sample],
    rewards: Reals,
    call_rewards: Mapping[str, Reals],
    *,
    values: Sequence[FloatArray] | None = None,
    penalties: Sequence[FloatArray] | None = None,
    state: StateKey = observation,
) -> Layout:
    """One step a call that has trained tokens.

    `rollouts` are the N ids that count, each with a trained token; `samples` are theirs. `rewards` is (N,),
    `call_rewards` gives one number for each call of an attempt, by rollout id. `values` and `penalties` have one array
    (T,) for each sample: a call's value is the one at its first trained token, its penalty the sum over its tokens.
    """
    index = {name: number for number, name in enumerate(rollouts)}
    first: dict[tuple[int, int], tuple[int, int]] = {}  # call -> its first trained token, as (sample, position)
    for number, sample in enumerate(samples):
        at = np.flatnonzero(sample.loss_mask)
        calls, begins = np.unique(sample.call_index[at], return_index=True)
        for call, begin in zip(calls.tolist(), at[begins].tolist(), strict=True):
            key = (index[sample.rollout_id], call)
            if call < 0:
                raise BatchError(f"rollout {sample.rollout_id!r}: a trained token has no call_index.")
            first[key] = min(first.get(key, (number, begin)), (number, begin))
    order = sorted(first)
    step_of = {key: step for step, key in enumerate(order)}
    rollout = np.array([key[0] for key in order], dtype=np.int64)
    earned = _earned(rollouts, order, rewards, call_rewards)
    of_token = []
    for number, sample in enumerate(samples):
        owner, at = index[sample.rollout_id], np.full(len(sample.token_ids), -1, dtype=np.int64)
        calls, which = np.unique(sample.call_index[sample.loss_mask], return_inverse=True)
        at[sample.loss_mask] = np.array([step_of[owner, call] for call in calls.tolist()], dtype=np.int64)[which]
        if penalties is not None:
            np.subtract.at(earned, at[at >= 0], penalties[number][at >= 0])
        of_token.append(at)
    begins_at = [first[key] for key in order]
    of_call = None if values is None else np.array([values[number][at] for number, at in begins_at], dtype=np.float32)
    steps = Steps(
        rollout=rollout,
        rewards=earned,
        states=tuple(state(samples[number], at) for number, at in begins_at),
        values=of_call,
    )
    return Layout(steps=steps, of_token=tuple(of_token))


def by_token(
    rollouts: Sequence[str],
    samples: Sequence[Sample],
    rewards: Reals,
    call_rewards: Mapping[str, Reals],
    *,
    values: Sequence[FloatArray] | None = None,
    penalties: Sequence[FloatArray] | None = None,
) -> Layout:
    """One step a trained token, in the order in which they were sampled; a call's reward comes with its last token.

    Arguments as for `by_call`. Context between two calls takes no time: no discount, no value. Where a call was asked
    for several answers, and more than one is trained, they count one after the other.
    """
    calls = by_call(rollouts, samples, rewards, call_rewards)
    at = [np.flatnonzero(sample.loss_mask) for sample in samples]
    call = np.concatenate([step[where] for step, where in zip(calls.of_token, at, strict=True)])
    row = np.repeat(np.arange(len(at)), [len(where) for where in at])
    order = np.lexsort((np.concatenate(at), row, call))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    of_token, done = [], 0
    for sample, where in zip(samples, at, strict=True):
        steps_of_sample = np.full(len(sample.token_ids), -1, dtype=np.int64)
        steps_of_sample[where] = place[done : done + len(where)]
        done += len(where)
        of_token.append(steps_of_sample)

    def in_order(arrays: Sequence[FloatArray]) -> FloatArray:
        return np.concatenate([array[where] for array, where in zip(arrays, at, strict=True)])[order]

    earned = np.zeros(len(order))
    earned[last_steps(call[order])] = calls.steps.rewards
    if penalties is not None:
        earned -= in_order(penalties)
    steps = Steps(
        rollout=calls.steps.rollout[call[order]],
        rewards=earned,
        values=None if values is None else in_order(values),
    )
    return Layout(steps=steps, of_token=tuple(of_token))


def _earned(
    rollouts: Sequence[str],
    order: Sequence[tuple[int, int]],
    rewards: Reals,
    call_rewards: Mapping[str, Reals],
) -> Doubles:
    """What each step of `order`, sorted pairs of rollout and call, earned."""
    earned = np.zeros(len(order))
    keys = np.array(order, dtype=np.int64).reshape(-1, 2)
    for number, name in enumerate(rollouts):
        mine = np.flatnonzero(keys[:, 0] == number)
        earned[mine[-1]] += rewards[number]
        given = np.asarray(call_rewards.get(name, ()), dtype=np.float64)
        if not np.isfinite(given).all():
            raise BatchError(f"rollout {name!r}: the reward of a call is not finite.")
        before = np.searchsorted(keys[mine, 1], np.arange(len(given)), side="right") - 1
        np.add.at(earned, mine[before[before >= 0]], given[before >= 0])
    return earned


def _digest(sample: Sample, start: int, stop: int) -> str:
    ids = np.ascontiguousarray(sample.token_ids[start:stop], dtype=np.int32)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()
