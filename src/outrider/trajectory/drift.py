"""What broke the continuity of tokens between calls, and how many tokens that cost.

A call *continues* where its prompt starts with the whole sequence of an earlier answer; then its row goes on, and only
what is new is computed. A call that goes on with a talk but not with its tokens is a **break**: its prompt is computed
anew from where it differs, and a further row with its whole context is trained.

The cause is what the gateway noted (`Call.continuation`). Where the engine rendered the prompt there is no note; the
request is then compared with the earlier one whose tokens it shares most of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from outrider.trajectory.branch import Branch
from outrider.trajectory.requests import asked
from outrider.trajectory.tree import Tree, build
from outrider.types import Break, Call, IntArray, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """How the prompt of one exact call relates to what came before."""

    harness: str
    """Dialect and model asked for: what tells agents on one key apart."""
    turn: int
    """1 for a request without an answer in its history."""
    cause: str
    """Why continuity broke; empty where it did not."""
    prompt_tokens: int
    opens_row: bool
    """It broke, so that a row ends where it would have gone on: one more than without."""
    recomputed: int
    """Tokens of the closest earlier branch that the prompt does not share, up to the prompt's own length."""


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    breaks: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0

    def add(self, one: Continuity) -> None:
        self.calls += 1
        self.breaks += bool(one.cause)
        self.prompt_tokens += one.prompt_tokens
        self.recomputed_tokens += one.recomputed

    def as_json(self) -> Json:
        return {
            "calls": self.calls,
            "breaks": self.breaks,
            "prompt_tokens": self.prompt_tokens,
            "recomputed_tokens": self.recomputed_tokens,
        }


@dataclass(slots=True)
class Drift:
    """Sums over attempts. `add` one after the other, then `report`."""

    _rollouts: int = 0
    _calls: int = 0
    _rows: int = 0
    _unique: int = 0
    _found: list[Continuity] = field(default_factory=list)

    def add(self, calls: Sequence[Call]) -> None:
        """The calls of one attempt. Raises as `build`."""
        tree = build(calls)
        parents = {branch.parent for branch in tree.branches}
        self._rollouts += 1
        self._calls += len(calls)
        self._rows += sum(branch not in parents for branch in tree.branches)
        self._unique += tree.unique_tokens
        self._found += continuity(calls, tree)

    def report(self) -> Json:
        """Sums of all, of each harness and of each of its turns. Calls that are not exact count in `calls` alone."""
        total, harnesses = _Sum(), defaultdict[str, _Sum](_Sum)
        turns, causes = defaultdict[tuple[str, int], _Sum](_Sum), defaultdict[tuple[str, int, str], _Sum](_Sum)
        for one in self._found:
            for part in (total, harnesses[one.harness], turns[one.harness, one.turn]):
                part.add(one)
            if one.cause:
                causes[one.harness, one.turn, one.cause].add(one)
        return {
            "rollouts": self._rollouts,
            **total.as_json(),
            "calls": self._calls,
            "exact_calls": total.calls,
            "unique_tokens": self._unique,
            "rows": self._rows,
            "rows_without_breaks": self._rows - sum(one.opens_row for one in self._found),
            "harnesses": [
                {
                    "harness": harness,
                    **part.as_json(),
                    "turns": [
                        {
                            "turn": turn,
                            **turns[name, turn].as_json(),
                            "causes": {
                                cause: {"calls": found.calls, "recomputed_tokens": found.recomputed_tokens}
                                for (whose, when, cause), found in sorted(causes.items())
                                if (whose, when) == (name, turn)
                            },
                        }
                        for name, turn in sorted(turns)
                        if name == harness
                    ],
                }
                for harness, part in sorted(harnesses.items())
            ],
        }


def continuity(calls: Sequence[Call], tree: Tree) -> list[Continuity]:
    """Each exact call of `tree`, which was built of `calls`, in order of commit."""
    found: list[Continuity] = []
    earlier: list[Branch] = []
    by_id = {call.id: call for call in calls}
    followers = Counter(branch.parent for branch in tree.branches)
    for branch in tree.branches:
        call = by_id[branch.answer.call_id]
        if not earlier or earlier[-1].answer.call_id != call.id:  # further choices have the same prompt
            request = asked(call)
            cause, opens_row, recomputed = "", False, 0
            outcome = call.continuation.partition("; ")[0]
            noted = outcome.startswith("broke: ")
            # Of the answers in its history, the prompt has as many token for token.
            kept = 0 if branch.parent is None else asked(by_id[branch.parent.answer.call_id]).answers + 1
            lost = request.answers > kept and outcome not in ("opened", "continued")
            if earlier and (noted or lost):
                closest, shared = _closest(branch.token_ids()[: branch.start], earlier)
                other = by_id[closest.answer.call_id]
                cause = outcome.removeprefix("broke: ") if noted else _difference(call, other).value
                recomputed = max(0, min(closest.end, branch.start) - shared)
                opens_row = not followers[closest]
                followers[closest] += 1
            found.append(
                Continuity(
                    harness=f"{call.dialect} · {call.model}",
                    turn=request.answers + 1,
                    cause=cause,
                    prompt_tokens=branch.start,
                    opens_row=opens_row,
                    recomputed=recomputed,
                )
            )
        earlier.append(branch)
    return found


def _closest(prompt: IntArray, earlier: Sequence[Branch]) -> tuple[Branch, int]:
    """The branch that shares most of `prompt`, the newest of equal ones, and how many tokens that is."""
    best, most = earlier[-1], -1
    for branch in reversed(earlier):
        ids = branch.token_ids()[: len(prompt)]
        differ = np.flatnonzero(ids != prompt[: len(ids)])
        shared = int(differ[0]) if len(differ) else len(ids)
        if shared > most:
            best, most = branch, shared
    return best, most


def _difference(call: Call, other: Call) -> Break:
    """What the requests tell of why the prompt of `call` does not go on from `other`."""
    if asked(call).system != asked(other).system:
        return Break.SYSTEM_CHANGED
    if _tools(call) != _tools(other):
        return Break.TOOLS_CHANGED
    return Break.UNKNOWN


def _tools(call: Call) -> object:
    try:
        body = msgspec.json.decode(call.request)
    except msgspec.DecodeError:
        return None
    return body.get("tools") or None if isinstance(body, dict) else None
