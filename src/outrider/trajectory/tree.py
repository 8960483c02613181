"""From the recorded calls of one attempt to a tree over token ids. See the package's docstring for the idea."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.errors import TrajectoryError
from outrider.trajectory.branch import Answer, Branch
from outrider.trajectory.rows import Exclusions, SampleSet, TooLong, cut
from outrider.trajectory.trie import Node, Trie
from outrider.types import Call, CallState, Choice, Fidelity, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The branches of one attempt, in order of commit; each knows its parent. Holds every distinct token once."""

    branches: tuple[Branch, ...]
    outside: Exclusions = field(default_factory=Exclusions)
    """Answers that cannot be part of the tree."""
    tokens: int = 0
    """Prompt and sampled tokens of all branches, a prompt with several choices counted once."""
    unique_tokens: int = 0
    """Distinct ones: what a model computes that shares every prefix, and what the tree takes in memory."""

    @property
    def breaks(self) -> int:
        """How often continuity was lost: different prompts that extend no branch, less the first one."""
        openings = {branch.opening() for branch in self.branches if branch.parent is None}
        return max(0, len(openings) - 1)

    def samples(
        self,
        *,
        rollout_id: str,
        group_id: str,
        max_tokens: int | None = None,
        too_long: TooLong = "drop",
    ) -> SampleSet:
        """Cut the tree into rows that train each sampled token at most once.

        A row is the sequence of a leaf, up to its last trained answer. Where it is longer than `max_tokens`:

        - ``drop``: the row is left out. Its answers may still be trained in a shorter row that holds them.
        - ``drop_rollout``: the whole attempt is left out.
        - ``keep_start``: the row ends after its last whole answer that fits.
        - ``cut``: the row ends at `max_tokens`, be it within an answer, which then counts as truncated.

        The beginning is never cut: a token was sampled in its whole context, and in no other one.

        Answers at different temperatures go to different rows. Greedy answers (temperature 0) stay context: their
        log-prob is 0 by definition, so a policy gradient says nothing about them. Raises `TrajectoryError` on another
        rule than these.
        """
        return cut(
            self.branches,
            self.outside,
            rollout_id=rollout_id,
            group_id=group_id,
            max_tokens=max_tokens,
            too_long=too_long,
        )


def build(calls: Iterable[Call], left_out: Mapping[str, str] | None = None) -> Tree:
    """Join the calls of one attempt, given in any order, into a tree. They are read once, one after the other.

    `Sample.call_index` numbers all of them in order of commit, whatever order they were given in.

    Only complete calls of fidelity `exact` take part; the others are counted. `left_out` gives, by call id, the reason
    why a call is context only (see `outrider.trajectory.leave_out`). Raises `TrajectoryError` where a call that claims
    to be exact contradicts itself, or calls of several attempts are mixed.
    """
    trie, joined, outside, tokens = Trie(), list[Answer](), Exclusions(), 0
    seen: set[str] = set()
    committed: list[tuple[int, float]] = []
    attempt_id: str | None = None
    for index, call in enumerate(calls):
        committed.append((call.seq, call.started_at))
        _check_belongs(call, attempt_id, seen)
        attempt_id = call.attempt_id
        reason = _unusable(call)
        if reason:
            sampled = sum(len(choice.token_ids) for choice in call.choices)
            outside.add(reason, answers=max(1, len(call.choices)), tokens=sampled)
            continue
        prompt = _prompt(call)
        below = trie.put(prompt)
        tokens += len(prompt)
        for choice in call.choices:
            _check(call, choice)
            if len(choice.token_ids) == 0:
                outside.add("empty_completion", answers=1, tokens=0)
                continue
            end = trie.put(choice.token_ids, below)
            end.node.marks.append((end.offset, len(joined)))
            joined.append(_answer(call, index, choice, (left_out or {}).get(call.id, "")))
            tokens += len(choice.token_ids)
    trie.trim()
    joined = _numbered(joined, committed)
    return Tree(branches=_branches(trie, joined), outside=outside, tokens=tokens, unique_tokens=trie.tokens)


def _numbered(answers: list[Answer], committed: Sequence[tuple[int, float]]) -> list[Answer]:
    """Number calls by when they were committed, not by when they were given; of equal ones the first given is first."""
    order = sorted(range(len(committed)), key=committed.__getitem__)
    if order == list(range(len(order))):
        return answers
    number = {index: place for place, index in enumerate(order)}
    return [replace(answer, call_index=number[answer.call_index]) for answer in answers]


def _branches(trie: Trie, answers: Sequence[Answer]) -> tuple[Branch, ...]:
    """Give each answer its parent: one walk over the tree, from the root down.

    On the way the checksum of each sequence is computed anew and compared with that of the recorded call.
    """
    made: list[Branch] = []
    path: list[Branch] = []  # one for each length at which a branch ends, on the way from the root to the node
    waiting: list[tuple[Node, int, int]] = [(trie.root, 0, 0)]
    while waiting:
        node, depth, checksum = waiting.pop()
        del path[depth:]
        done = 0
        for offset, number in sorted(node.marks, key=lambda mark: (mark[0], answers[mark[1]].order)):
            answer = answers[number]
            checksum = _checksum(node.ids[done:offset], checksum)
            done = offset
            if answer.end != node.start + offset or answer.checksum != checksum:
                raise TrajectoryError(f"call {answer.call_id}: the tree does not hold the tokens that were recorded.")
            parent = next((branch for branch in reversed(path) if branch.end <= answer.start), None)
            branch = Branch(answer=answer, parent=parent, node=node)
            made.append(branch)
            if not path or path[-1].end < branch.end:  # of equal sequences the first one is continued
                path.append(branch)
        checksum = _checksum(node.ids[done:], checksum)
        waiting += [(child, len(path), checksum) for child in node.children.values()]
    return tuple(sorted(made, key=lambda branch: branch.answer.order))


def _answer(call: Call, index: int, choice: Choice, left_out: str) -> Answer:
    prompt = _prompt(call)
    temperature = call.sampling.get("temperature")
    versions = [version for version in (call.version_start, call.version_end) if version is not None]
    if choice.versions:
        versions = [version for version, _ in choice.versions]
    return Answer(
        call_id=call.id,
        call_index=index,
        choice_index=choice.index,
        attempt_id=call.attempt_id,
        model=call.model,
        start=len(prompt),
        end=len(prompt) + len(choice.token_ids),
        logprobs=choice.logprobs,
        finish_reason=choice.finish_reason,
        # Weights swapped within a call, and nobody knows when: the older version, since the oldest token counts.
        version=min(versions, default=-1),
        versions=choice.versions if len(choice.versions) > 1 else (),
        temperature=1.0 if temperature is None else float(temperature),
        left_out=left_out,
        order=(call.seq, call.started_at, call.id, choice.index),
        checksum=_checksum(choice.token_ids, _checksum(prompt, 0)),
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
    if choice.versions and sum(count for _, count in choice.versions) != len(ids):
        raise TrajectoryError(f"{where}: {len(ids)} token ids, and policy versions for another number of them.")


def _check_belongs(call: Call, attempt_id: str | None, seen: set[str]) -> None:
    if attempt_id is not None and call.attempt_id != attempt_id:
        raise TrajectoryError(f"calls of several attempts in one tree: {attempt_id}, {call.attempt_id}.")
    if call.id in seen:
        raise TrajectoryError(f"call {call.id} is given twice.")
    seen.add(call.id)


def _prompt(call: Call) -> IntArray:
    if call.prompt_ids is None:
        raise TrajectoryError(f"call {call.id} has no prompt ids.")
    return call.prompt_ids


def _checksum(ids: IntArray, so_far: int) -> int:
    return zlib.crc32(np.ascontiguousarray(ids, dtype="<i4").data, so_far)
