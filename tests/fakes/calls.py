"""Calls whose tokens are given, for tests of what is joined from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outrider.trajectory import SampleSet, Tree
from outrider.types import Call, CallState, Choice, Fidelity, Runs, Sample


def choice(
    ids: Sequence[int], index: int = 0, finish: str = "stop", first: float = -0.25, versions: Runs = ()
) -> Choice:
    logprobs = np.array([first - 0.01 * position for position in range(len(ids))], dtype=np.float32)
    token_ids = np.array(ids, dtype=np.int32)
    return Choice(index=index, token_ids=token_ids, logprobs=logprobs, finish_reason=finish, versions=versions)


def call(
    prompt: Sequence[int] | None,
    *completions: Sequence[int] | Choice,
    seq: int = 0,
    temperature: float | None = 1.0,
    **changes,
) -> Call:
    choices = tuple(c if isinstance(c, Choice) else choice(c, index) for index, c in enumerate(completions))
    made = Call(
        id=f"c{seq}",
        attempt_id="a1",
        dialect="openai_chat",
        model="policy",
        state=CallState.COMPLETE,
        status=200,
        streamed=False,
        request=b"",
        response=b"",
        prompt_ids=None if prompt is None else np.array(prompt, dtype=np.int32),
        choices=choices,
        usage=None,
        fidelity=Fidelity.EXACT,
        sampling={} if temperature is None else {"temperature": temperature},
        version_start=0,
        version_end=0,
        seq=seq,
    )
    return replace(made, **changes)


def text_call(request: bytes, response: bytes = b"{}", **changes) -> Call:
    """One of which the bodies are known and no tokens."""
    return call(None, request=request, response=response, fidelity=Fidelity.TEXT, **changes)


def cut(tree: Tree, **options) -> SampleSet:
    return tree.samples(rollout_id="r1", group_id="g1", **options)


def trained(sample: Sample) -> list[int]:
    return sample.token_ids[sample.loss_mask].tolist()
