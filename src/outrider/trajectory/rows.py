"""From branches to training rows under a length budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from outrider.errors import TrajectoryError
from outrider.trajectory.branch import Branch
from outrider.types import IntArray, Runs, Sample

TooLong = Literal["drop", "drop_rollout", "keep_start", "cut"]

GREEDY = "greedy"
TOO_LONG = "too_long"


@dataclass(slots=True)
class Exclusions:
    """What is not trained, by reason. Answers are choices; a call without any counts as one."""

    answers: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens."""

    def add(self, reason: str, *, answers: int, tokens: int) -> None:
        self.answers[reason] += answers
        self.tokens[reason] += tokens

    def __add__(self, other: Exclusions) -> Exclusions:
        return Exclusions(self.answers + other.answers, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Training rows of one attempt, and what was left out."""

    samples: tuple[Sample, ...]
    excluded: Counter[str]
    """Sampled answers that no row trains on, by reason."""
    excluded_tokens: Counter[str]
    """Sampled tokens that no row trains on, by reason."""


def cut(
    branches: Sequence[Branch],
    outside: Exclusions,
    *,
    rollout_id: str,
    group_id: str,
    max_tokens: int | None,
    too_long: TooLong,
) -> SampleSet:
    """See `Tree.samples`. `outside` is what is not in the tree at all."""
    if too_long not in get_args(TooLong):
        raise TrajectoryError(f"too_long: there is no {too_long!r}. Known: {', '.join(get_args(TooLong))}.")
    excluded = Exclusions()
    waiting: dict[Branch, None] = {}  # a set that keeps its order
    for branch in branches:
        reason = branch.answer.left_out or (GREEDY if branch.answer.temperature <= 0 else "")
        if reason:
            excluded.add(reason, answers=1, tokens=branch.answer.tokens)
        else:
            waiting[branch] = None
    budget = max((branch.end for branch in branches), default=0) if max_tokens is None else max_tokens
    samples: list[Sample] = []
    if too_long != "drop_rollout" or all(branch.end <= budget for branch in waiting):
        parents = {branch.parent for branch in branches}
        for leaf in (branch for branch in branches if branch not in parents):
            for trained in _fitting(leaf, waiting, budget, too_long):
                samples.append(_row(trained, min(trained[-1].end, budget), rollout_id, group_id))
                for branch in trained:
                    del waiting[branch]
                beyond = trained[-1].end - len(samples[-1].token_ids)
                if beyond:
                    excluded.add(TOO_LONG, answers=0, tokens=beyond)
    for branch in waiting:
        excluded.add(TOO_LONG, answers=1, tokens=branch.answer.tokens)
    _check_all_accounted_for(branches, samples, excluded)
    total = outside + excluded
    return SampleSet(samples=tuple(samples), excluded=total.answers, excluded_tokens=total.tokens)


def _fitting(leaf: Branch, waiting: dict[Branch, None], budget: int, too_long: TooLong) -> Iterator[list[Branch]]:
    """The branches from the root to `leaf` that still wait for a row, one list a temperature, within the budget."""
    lists: dict[float, list[Branch]] = {}
    for branch in leaf.path():
        if branch in waiting:
            lists.setdefault(branch.answer.temperature, []).append(branch)
    for trained in lists.values():
        if too_long == "cut":
            kept = [branch for branch in trained if branch.start < budget]
        elif too_long == "keep_start":
            kept = [branch for branch in trained if branch.end <= budget]
        else:
            kept = trained if trained[-1].end <= budget else []
        if kept:
            yield kept


def _row(trained: Sequence[Branch], length: int, rollout_id: str, group_id: str) -> Sample:
    """The first `length` tokens of the last of `trained`, with a mask over the sampled tokens of all of them."""
    last = trained[-1]
    token_ids = last.token_ids()[:length]
    loss_mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    call_index = np.full(length, -1, dtype=np.int32)
    above = 0
    for branch in trained:
        if branch.start < above:
            raise TrajectoryError(f"call {branch.answer.call_id}: its answer lies within that of another one.")
        above = branch.end
        span = slice(branch.start, min(branch.end, length))
        loss_mask[span] = True
        logprobs[span] = branch.answer.logprobs[: span.stop - span.start]
        versions[span] = branch.answer.version
        if branch.answer.versions:
            _fill(versions[span], branch.answer.versions)
        call_index[span] = branch.answer.call_index
    return Sample(
        rollout_id=rollout_id,
        group_id=group_id,
        attempt_id=last.answer.attempt_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        call_index=call_index,
        truncated=last.answer.finish_reason == "length" or length < last.end,
        temperature=last.answer.temperature,
    )


def _fill(versions: IntArray, runs: Runs) -> None:
    """`versions` may end before the last of the `runs` does."""
    at = 0
    for version, count in runs:
        versions[at : at + count] = version
        at += count


def _check_all_accounted_for(branches: Sequence[Branch], samples: Sequence[Sample], excluded: Exclusions) -> None:
    """Every sampled token of the tree is trained in one row, or counted as left out."""
    sampled = sum(branch.answer.tokens for branch in branches)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    left_out = excluded.tokens.total()
    if sampled != trained + left_out:
        raise TrajectoryError(f"{sampled} tokens were sampled, but {trained} are trained and {left_out} left out.")
