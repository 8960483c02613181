"""The unit of scheduling: one sequence being sampled, the job it belongs to, and what is reported of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.engines.embedded.kv import block_keys
from outrider.engines.embedded.sampling import Sampling, generator
from outrider.engines.embedded.text import TextStream
from outrider.types import IntArray


@dataclass(slots=True, kw_only=True)
class Update:
    """News of one sequence: the tokens since the last one. The lists have equal lengths."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or the requested stop token that ended it; None for the model's own end token."""
    versions: list[list[int]] = field(default_factory=list)
    """Which policy versions sampled these tokens, as runs: ``[version, number of tokens]``, in order."""
    cached_tokens: int = 0
    """Prompt tokens that were not computed for this sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The job ended without an answer; nothing follows."""

    message: str
    status: int = 500


class Job:
    """One request: `n` sequences for each prompt, in this order. `deliver` is called from the scheduler's owner."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        *,
        stream: bool,
        seed: int,
        deliver: Callable[[Update | Failed], None],
    ) -> None:
        self.stream = stream
        self.deliver = deliver
        self.sequences = [
            RunningSequence(self, p * n + i, np.asarray(prompt, dtype=np.int32), sampling, generator(seed, i))
            for p, prompt in enumerate(prompts)
            for i in range(n)
        ]


def add_token(versions: list[list[int]], version: int) -> None:
    """One more token, sampled under `version`, to runs as in `Update.versions`."""
    if versions and versions[-1][0] == version:
        versions[-1][1] += 1
    else:
        versions.append([version, 1])


class RunningSequence:
    """State of one sequence. Belongs to the scheduler's thread once it is submitted."""

    def __init__(
        self, job: Job, index: int, prompt: IntArray, sampling: Sampling, random_source: random.Random
    ) -> None:
        self.job = job
        self.index = index
        self.prompt = prompt
        self.sampling = sampling
        self.random = random_source
        self.ids: list[int] = prompt.tolist()
        """Prompt and sampled tokens."""
        self.prompt_keys = block_keys(prompt)
        self.text = TextStream(sampling.stop)
        self.slot = -1
        self.computed = 0
        """How many of `ids` have their keys and values in the slot."""
        self.epoch: int | None = None
        """Which weights computed its prompt; None for none in particular, so that nobody may share it."""
        self.update = Update(index=index)
        self.cached = 0
        self._neighbour: RunningSequence | None = None
        self._alike = 0

    @property
    def sampled(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)

    def alike(self, other: RunningSequence) -> int:
        """How many first tokens of the prompts agree and were computed by the same weights."""
        if self._neighbour is not other:
            self._neighbour, self._alike = other, common_prefix(self.prompt, other.prompt)
        return self._alike if self.epoch is not None and self.epoch == other.epoch else 0


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
