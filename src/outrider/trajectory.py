"""From the recorded calls of one attempt to a tree over token ids, and from the tree to training samples.

    tree = build(calls)
    rows = tree.samples(rollout_id="r1", group_id="task-7", max_tokens=2048)

A **branch** is one sampled answer in its context: the prompt of a call followed by the ids of one of its choices. A
branch's parent is the longest other branch whose whole sequence its prompt starts with. Nothing else is consulted: no
message text, no order in time, no scan for special tokens. So interleaved agents, parallel calls, retries and edited
histories end up where their tokens say, and ids are never re-encoded (DESIGN.md, invariants 3 and 4).

    call 1   p p p A A                       root of the tree
    call 2   p p p A A u u B B               child of call 1: its prompt extends [p p p A A]
    call 3   p p p A A w C                   also a child of call 1: the history was edited after A
    call 4   q q D                           no branch is a prefix of [q q]: a second root, a *break* of continuity

A sample is the sequence of a leaf exactly as a policy saw it. Each sampled token is trained once: in the first sample,
in order of commit, that holds its branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from outrider.errors import TrajectoryError
from outrider.types import Call, CallState, Choice, Fidelity, IntArray, Sample

_Hash = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """One sampled answer in its context: ``call.prompt_ids`` followed by ``choice.token_ids``."""

    call: Call
    choice: Choice
    call_index: int
    """Position of the call in the sequence given to `build`."""
    parent: Branch | None

    @property
    def start(self) -> int:
        """Where the sampled tokens begin in the branch's sequence: the length of the prompt."""
        return len(_prompt(self.call))

    @property
    def end(self) -> int:
        """Length of the branch's whole sequence."""
        return self.start + len(self.choice.token_ids)

    @property
    def temperature(self) -> float:
        value = self.call.sampling.get("temperature")
        return 1.0 if value is None else float(value)

    def token_ids(self) -> IntArray:
        """Prompt and completion in one array, shape (end,)."""
        return np.concatenate([_prompt(self.call), self.choice.token_ids]).astype(np.int32, copy=False)

    def path(self) -> list[Branch]:
        """From the root to this branch."""
        branches: list[Branch] = []
        node: Branch | None = self
        while node is not None:
            branches.append(node)
            node = node.parent
        return branches[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Training rows of one attempt, and what was left out."""

    samples: tuple[Sample, ...]
    excluded: Counter[str]
    """Sampled answers (choices; a call without any counts as one) that no row trains on, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The branches of one attempt, in order of commit; each knows its parent."""

    branches: tuple[Branch, ...]
    excluded: Counter[str] = field(default_factory=Counter)
    """Answers that cannot be part of the tree, by reason."""

    @property
    def breaks(self) -> int:
        """How often continuity was lost: different prompts that extend no branch, less the first one."""
        openings = {_prompt(branch.call).tobytes() for branch in self.branches if branch.parent is None}
        return max(0, len(openings) - 1)

    def samples(
        self,
        *,
        rollout_id: str,
        group_id: str,
        max_tokens: int | None = None,
        too_long: Literal["drop", "cut"] = "drop",
    ) -> SampleSet:
        """Cut the tree into rows that train each sampled token at most once.

        A row longer than `max_tokens` is dropped whole, or with ``too_long="cut"`` ended after its last answer that
        fits: the beginning is never cut, since a token without its context was never sampled. Answers at different
        temperatures go to different rows. Greedy answers (temperature 0) stay context: their log-prob is 0 by
        definition, so a policy gradient says nothing about them.
        """
        parents = {branch.parent for branch in self.branches}
        leaves = [branch for branch in self.branches if branch not in parents]
        waiting = {branch: None for branch in self.branches if branch.temperature > 0}  # a set that keeps its order
        samples: list[Sample] = []
        for leaf in leaves:
            path = leaf.path()
            if too_long == "cut" and max_tokens is not None:
                path = [branch for branch in path if branch.end <= max_tokens]
            for trained in _by_temperature(path, waiting):
                if max_tokens is None or trained[-1].end <= max_tokens:
                    samples.append(_sample(trained, rollout_id, group_id))
                    for branch in trained:
                        del waiting[branch]
        excluded = Counter(self.excluded)
        excluded["greedy"] += sum(branch.temperature <= 0 for branch in self.branches)
        excluded["too_long"] += len(waiting)
        return SampleSet(samples=tuple(samples), excluded=+excluded)


def build(calls: Sequence[Call]) -> Tree:
    """Join the calls of one attempt, given in any order, into a tree.

    Only complete calls of fidelity `exact` take part; the others are counted in `Tree.excluded`. Raises
    `TrajectoryError` where a call that claims to be exact contradicts itself, or calls of several attempts are mixed.
    """
    _check_same_attempt(calls)
    excluded: Counter[str] = Counter()
    found: list[tuple[int, Call, Choice]] = []
    for index, call in enumerate(calls):
        reason = _unusable(call)
        if reason:
            excluded[reason] += max(1, len(call.choices))
            continue
        for choice in sorted(call.choices, key=lambda choice: choice.index):
            _check(call, choice)
            if len(choice.token_ids):
                found.append((index, call, choice))
            else:
                excluded["empty_completion"] += 1
    found.sort(key=lambda item: (item[1].seq, item[1].started_at, item[1].id, item[2].index))
    return Tree(branches=_link(found), excluded=excluded)


def _link(found: Sequence[tuple[int, Call, Choice]]) -> tuple[Branch, ...]:
    """Find each branch's parent. Time and memory are linear in tokens, plus calls times distinct lengths.

    All branches are hashed once; a prompt's running hash is then looked up at the lengths that branches have, longest
    first, and a hit is compared token by token, so that a collision can't join what does not belong together.
    """
    longest = max((len(_prompt(call)) + len(choice.token_ids) for _, call, choice in found), default=0)
    keys = np.random.default_rng(0x0D1D).integers(1, 2**64, size=longest, dtype=np.uint64)
    by_hash: dict[tuple[int, int], list[int]] = {}
    sequences = [np.concatenate([_prompt(call), choice.token_ids]) for _, call, choice in found]
    for position, ids in enumerate(sequences):
        by_hash.setdefault((len(ids), int(_running_hash(ids, keys)[-1])), []).append(position)
    lengths = np.array(sorted({length for length, _ in by_hash}, reverse=True), dtype=np.int64)

    parent_of: dict[int, int | None] = {}
    for position, (_, call, _) in enumerate(found):
        prompt = _prompt(call)
        hashes = _running_hash(prompt, keys)
        fitting = lengths[lengths <= len(prompt)]
        candidates = (
            candidate
            for length, value in zip(fitting.tolist(), hashes[fitting - 1].tolist(), strict=True)
            for candidate in by_hash.get((length, value), ())
        )
        parent_of[position] = next(
            (other for other in candidates if np.array_equal(sequences[other], prompt[: len(sequences[other])])), None
        )

    made: dict[int, Branch] = {}
    for position in sorted(parent_of, key=lambda position: len(sequences[position])):  # a parent is always shorter
        index, call, choice = found[position]
        above = parent_of[position]
        parent = None if above is None else made[above]
        made[position] = Branch(call=call, choice=choice, call_index=index, parent=parent)
    return tuple(made[position] for position in range(len(found)))


def _running_hash(ids: IntArray, keys: _Hash) -> _Hash:
    """Hash of every prefix, shape (T,): sum of ``(id + 1) * key[position]`` modulo 2**64 (multilinear hashing)."""
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * keys[: len(ids)], dtype=np.uint64)


def _by_temperature(path: Sequence[Branch], waiting: dict[Branch, None]) -> Iterator[list[Branch]]:
    """The branches of `path` that still wait for a row, one list for each temperature."""
    lists: dict[float, list[Branch]] = {}
    for branch in path:
        if branch in waiting:
            lists.setdefault(branch.temperature, []).append(branch)
    yield from lists.values()


def _sample(trained: Sequence[Branch], rollout_id: str, group_id: str) -> Sample:
    """The row that ends with the last of `trained` and has a mask over the sampled tokens of all of them."""
    last = trained[-1]
    token_ids = last.token_ids()
    total = len(token_ids)
    loss_mask = np.zeros(total, dtype=np.bool_)
    logprobs = np.zeros(total, dtype=np.float32)
    versions = np.full(total, -1, dtype=np.int32)
    call_index = np.full(total, -1, dtype=np.int32)
    for branch in trained:
        span = slice(branch.start, branch.end)
        if loss_mask[span].any() or not np.array_equal(token_ids[span], branch.choice.token_ids):
            raise TrajectoryError(f"call {branch.call.id}: its sampled tokens are not where its children have them.")
        loss_mask[span] = True
        logprobs[span] = branch.choice.logprobs
        # Weights swapped within a call: the older version, since staleness is judged by the oldest token.
        versions[span] = -1 if branch.call.version_start is None else branch.call.version_start
        call_index[span] = branch.call_index
    return Sample(
        rollout_id=rollout_id,
        group_id=group_id,
        attempt_id=last.call.attempt_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        versions=versions,
        call_index=call_index,
        truncated=last.choice.finish_reason == "length",
        temperature=last.temperature,
    )


def _unusable(call: Call) -> str:
    """Why a call cannot be part of the tree; empty where it can."""
    if call.state is not CallState.COMPLETE:
        return call.state.value
    if call.fidelity is Fidelity.BROKEN:
        return f"broken: {call.fidelity_reason}" if call.fidelity_reason else "broken"
    if call.fidelity is not Fidelity.EXACT:
        return call.fidelity.value
    if call.prompt_ids is None or len(call.prompt_ids) == 0:
        return "no_prompt_ids"
    return "" if call.choices else "no_choices"


def _check(call: Call, choice: Choice) -> None:
    """Raise where an exact call does not add up."""
    prompt, ids, logprobs = _prompt(call), choice.token_ids, choice.logprobs
    where = f"call {call.id}, choice {choice.index}"
    if len(ids) != len(logprobs):
        raise TrajectoryError(f"{where}: {len(ids)} token ids but {len(logprobs)} log-probs.")
    if (len(ids) and int(ids.min()) < 0) or int(prompt.min()) < 0:
        raise TrajectoryError(f"{where}: a token id is negative.")
    if not np.isfinite(logprobs).all() or (len(logprobs) and float(logprobs.max()) > 1e-3):
        raise TrajectoryError(f"{where}: log-probs must be finite and at most 0.")


def _check_same_attempt(calls: Sequence[Call]) -> None:
    attempts = {call.attempt_id for call in calls}
    if len(attempts) > 1:
        raise TrajectoryError(f"calls of several attempts in one tree: {', '.join(sorted(attempts))}.")
    repeated = [call_id for call_id, count in Counter(call.id for call in calls).items() if count > 1]
    if repeated:
        raise TrajectoryError(f"call {repeated[0]} is given twice.")


def _prompt(call: Call) -> IntArray:
    if call.prompt_ids is None:
        raise TrajectoryError(f"call {call.id} has no prompt ids.")
    return call.prompt_ids
