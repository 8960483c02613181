"""How an attempt ended: whose failure it was, and what its reward says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from outrider.errors import RewardError
from outrider.protocols import Exit, RewardFunction
from outrider.types import UPSTREAM_STATUS, Call, CallState, Episode, Failure, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A service of ours was down."""

    service: Failure
    """`Failure.GATEWAY` or `Failure.ENGINE`."""
    began_at: float
    ended_at: float


def classify(ended: Exit, calls: Sequence[Call], started_at: float, outages: Sequence[Outage]) -> tuple[Failure, str]:
    """Tell the harness's own failures from ours.

    Order matters: what we know for certain comes first. A call that failed upstream counts as healed when a later one
    with the same body completed, which is what a client's retry looks like.
    """
    if ended.cancelled:
        return Failure.CANCELLED, ended.reason or "run stopped"
    if ended.not_found:
        return Failure.HARNESS_NOT_FOUND, ended.reason
    if ended.lost:
        return Failure.EXECUTOR, ended.reason or "the executor lost the process"
    for outage in outages:
        if outage.ended_at >= started_at:
            return outage.service, f"the {outage.service} was restarted while it ran"
    healed = {call.request for call in calls if call.state is CallState.COMPLETE}
    for call in calls:
        if _engine_failed(call) and call.request not in healed:
            return Failure.ENGINE, f"call {call.id} got {call.status}: {call.error}"
    if not calls:
        how = "timed out" if ended.timed_out else f"exit status {ended.exit_code}, signal {ended.signal}"
        return Failure.NO_CALLS, f"the harness never called the model ({how})"
    if ended.timed_out:
        return Failure.HARNESS_TIMEOUT, ended.reason or f"over its time limit after {ended.duration_s:.1f} s"
    if ended.exit_code != 0:
        how = f"killed by signal {ended.signal}" if ended.signal else f"exit status {ended.exit_code}"
        return Failure.HARNESS_EXIT, how
    return Failure.NONE, ""


class InvalidReward(RewardError):
    """The reward returned something that is no finite number."""


def _engine_failed(call: Call) -> bool:
    """True of a status from 500 on, and of a stream that broke off or told of an error: its status was 200 by then.

    An error status below 500 is the harness's business, also where its protocol tells it in a stream with status 200.
    """
    if call.state is not CallState.FAILED:
        return False
    refused = call.error.startswith(f"{UPSTREAM_STATUS}4")
    return call.status >= 500 or (call.status < 300 and not refused)


def scored(reward: RewardFunction, name: str, episode: Episode) -> Score:
    """Call a reward plug-in. Raises `RewardError` when it raises, `InvalidReward` for what is no finite number."""
    try:
        result = reward(episode)
    except Exception as error:
        raise RewardError(f"reward {name} raised {type(error).__name__}: {error}") from error
    score = result if isinstance(result, Score) else None
    value = score.value if score else result
    if not _is_finite(value):
        raise InvalidReward(f"reward {name} returned {value!r}; it must be a finite number or a Score")
    if score is None:
        return Score(value=float(value))
    known = {call.id for call in episode.calls}
    for call_id, of_call in score.calls.items():
        if call_id not in known:
            raise InvalidReward(f"reward {name} scored call {call_id!r}, which this attempt did not make")
        if not _is_finite(of_call):
            raise InvalidReward(f"reward {name} gave call {call_id} {of_call!r}; it must be a finite number")
    return score


def _is_finite(value: object) -> TypeGuard[float]:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
