"""One sampled answer, and its place in the tree."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.trajectory.trie import Node
from outrider.types import FloatArray, IntArray, Runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What is known of one choice of a call, but for its tokens, which the tree holds."""

    call_id: str
    call_index: int
    """Position of the call among those given to `build`, in order of commit."""
    choice_index: int
    attempt_id: str
    model: str
    """As the harness asked for it."""
    start: int
    """Length of the prompt."""
    end: int
    """Length of prompt and answer."""
    logprobs: FloatArray
    """Shape (end - start,)."""
    finish_reason: str | None
    version: int
    """Policy version of its oldest token; -1 where the weights are not ours."""
    versions: Runs
    """Of each token, where it is known that they are not all the same; else empty, and `version` stands for all."""
    temperature: float
    left_out: str
    """Why it is context only; empty where it is trained."""
    order: tuple[int, float, str, int]
    """Sorts answers by commit, whatever order the calls were given in."""
    checksum: int
    """CRC-32 of prompt and answer as recorded."""

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """One sampled answer in its context: the prompt of a call followed by the ids of one of its choices."""

    answer: Answer
    parent: Branch | None
    """The longest other branch whose whole sequence the prompt starts with."""
    node: Node
    """Where the sequence ends in the radix tree."""

    @property
    def start(self) -> int:
        return self.answer.start

    @property
    def end(self) -> int:
        return self.answer.end

    def token_ids(self) -> IntArray:
        """Prompt and answer in one array, shape (end,)."""
        return self.node.path_ids(self.end)

    def path(self) -> list[Branch]:
        """From the root to this branch."""
        branches: list[Branch] = []
        branch: Branch | None = self
        while branch is not None:
            branches.append(branch)
            branch = branch.parent
        return branches[::-1]

    def opening(self) -> tuple[int, int]:
        """Names the place where the prompt ends: two branches have equal prompts if and only if these are equal."""
        node = self.node
        while node.start >= self.start and node.parent is not None:
            node = node.parent
        return id(node), self.start
