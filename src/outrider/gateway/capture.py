"""From what a reply said about its tokens to a call's arrays and its fidelity.

A reason starts with a short kind and a colon, so that reasons can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import error as StructError
from struct import pack

import numpy as np

from outrider.gateway.versions import Versions
from outrider.types import Choice, Fidelity, FloatArray, IntArray, Usage
from outrider.wire import ReplyTokens, SampledChoice, id_array

BROKEN_OFF = frozenset({"abort", "error"})  # an engine's words for an answer that it gave up
MANY = 1 << 31  # tokens or choices: no call has so many
ROUNDING = 1e-3  # how far above 0 an engine's arithmetic may put a log-prob
_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    prompt_ids: IntArray | None
    choices: tuple[Choice, ...]
    usage: Usage | None
    fidelity: Fidelity
    reason: str


def capture(reply: ReplyTokens, *, failure: str = "", versions: Versions | None = None) -> Captured:
    """Decide the fidelity of a call (DESIGN.md, invariant 3). `failure` says why the call itself did not end well.
    `versions` are those of its tokens, where they are not all the same.

    Ids that can't be an array (null entries) are left out; lengths that differ are kept as they came, to be looked at.
    """
    prompt_ids = _ids([] if reply.prompt_ids is None else reply.prompt_ids)
    ids = [_ids(choice.token_ids) for choice in reply.choices]
    logprobs = [_floats(choice.logprobs) for choice in reply.choices]
    has_ids = prompt_ids is None or len(prompt_ids) > 0 or any(choice.token_ids for choice in reply.choices)
    if not has_ids and not reply.problem:
        fidelity, reason = Fidelity.TEXT, "text: the upstream gave no token ids"
    else:
        unfinished = f"unfinished: {failure}" if failure else ""
        nothing_came = not reply.choices and not reply.problem  # the gateway may know the prompt all the same
        reason = (unfinished if nothing_came else "") or _problem(reply, prompt_ids, ids, logprobs)
        reason = reason or (versions.problem if versions is not None else "") or unfinished
        fidelity = Fidelity.BROKEN if reason else Fidelity.EXACT
    choices = tuple(
        Choice(
            index=choice.index if abs(choice.index) < MANY else position,
            token_ids=_NO_IDS if token_ids is None else token_ids,
            logprobs=values,
            finish_reason=choice.finish_reason,
            versions=() if versions is None or token_ids is None else versions.runs[position],
        )
        for position, (choice, token_ids, values) in enumerate(zip(reply.choices, ids, logprobs, strict=True))
    )
    known_prompt = prompt_ids if prompt_ids is not None and len(prompt_ids) else None
    usage = reply.usage if reply.usage is not None and _counts(reply.usage) else None
    return Captured(prompt_ids=known_prompt, choices=choices, usage=usage, fidelity=fidelity, reason=reason)


def _counts(usage: Usage) -> bool:
    """It can be a number of tokens, and be stored."""
    return 0 <= usage.prompt_tokens < MANY and 0 <= usage.completion_tokens < MANY


def _problem(
    reply: ReplyTokens, prompt_ids: IntArray | None, ids: list[IntArray | None], logprobs: list[FloatArray]
) -> str:
    """The first thing that keeps a reply from being exact; empty if there is none."""
    if reply.problem:
        return f"reply: {reply.problem}"
    if prompt_ids is None:
        return "prompt ids: an entry is null or no token id"
    if not len(prompt_ids):
        return "prompt ids: there are none"
    if not ids:
        return "choices: there are none"
    for choice, token_ids, values in zip(reply.choices, ids, logprobs, strict=True):
        problem = _choice_problem(choice, token_ids, values)
        if problem:
            return problem
    usage = reply.usage
    if usage is None:
        return "usage: there is none to check the ids against"
    sampled = sum(len(choice.token_ids) for choice in reply.choices)
    if sampled != usage.completion_tokens:
        return f"usage: it counts {usage.completion_tokens} completion tokens, the reply carried {sampled} ids"
    if len(prompt_ids) != usage.prompt_tokens:
        return f"usage: it counts {usage.prompt_tokens} prompt tokens, the reply carried {len(prompt_ids)} ids"
    return ""


def _choice_problem(choice: SampledChoice, token_ids: IntArray | None, logprobs: FloatArray) -> str:
    if not 0 <= choice.index < MANY:
        return "choices: one has an index that is none"
    where = f"choice {choice.index}"
    if token_ids is None:
        return f"token ids: an entry of {where} is null or no token id"
    if not len(token_ids):
        return f"token ids: {where} has none"
    if len(token_ids) != len(logprobs):
        return f"lengths: {where} has {len(token_ids)} token ids and {len(logprobs)} log-probs"
    if not np.isfinite(logprobs).all():
        return f"log-probs: an entry of {where} is null or not finite"
    if np.maximum.reduce(logprobs) > ROUNDING:
        return f"log-probs: an entry of {where} is above 0"
    if not choice.finish_reason:
        return f"unfinished: {where} has no finish_reason"
    if choice.finish_reason in BROKEN_OFF:
        return f"unfinished: {where} ended with {choice.finish_reason}"
    return ""


def _ids(ids: list[int | None] | IntArray) -> IntArray | None:
    """None where an entry is no token id."""
    found = ids if isinstance(ids, np.ndarray) else id_array(ids)
    return None if found is None or (len(found) and np.minimum.reduce(found) < 0) else found


def _floats(values: list[float | None]) -> FloatArray:
    """Null becomes NaN, and what is beyond float32 an infinity."""
    try:
        return np.frombuffer(pack(f"{len(values)}f", *values), dtype=np.float32)
    except (StructError, OverflowError):
        with np.errstate(over="ignore"):
            return np.array([np.nan if value is None else value for value in values], dtype=np.float32)
