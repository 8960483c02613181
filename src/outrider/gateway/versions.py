"""Which policy version sampled each token of a call, where weights were swapped while it ran.

An engine of ours says so. Another one doesn't; but of a streamed answer it is known how many tokens had come when new
weights were served (`Admission.admit`), and those before were sampled under the version that was current until then.
Of a plain answer nothing is known but the versions at its start and its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from outrider.types import Runs
from outrider.wire import SampledChoice

LARGEST = 1 << 31  # versions are int32 in a row

Arrived = tuple[tuple[int, Mapping[int, int]], ...]
"""At each publish within a call: the version until then, and how many tokens each choice had got, by its index."""


class Versions(NamedTuple):
    """Those of a call with tokens of several, or of another version than it was forwarded under."""

    runs: tuple[Runs, ...]
    """One for each choice, in order; empty where nobody knows."""
    end: int
    """Of the newest token, or current at the end of the call, whichever is newer."""
    problem: str = ""
    """Why what the engine said can't be so."""


def versions_of(
    choices: Sequence[SampledChoice], *, start: int | None, end: int | None, arrived: Arrived | None
) -> Versions | None:
    """`start` was current when the call was forwarded, `end` is now; None where the weights are not ours. `arrived` is
    None where the answer did not come as a stream.

    None where the two say everything: the usual case.
    """
    if start is None or end is None:
        return None
    if any(choice.versions for choice in choices):
        return _as_told(choices, start, end)
    if start == end or arrived is None:
        return None
    return Versions(tuple(_as_arrived(choice, arrived, end) for choice in choices), end)


def _as_told(choices: Sequence[SampledChoice], start: int, end: int) -> Versions | None:
    # An engine serves new weights a moment before the gateway is told, so its word may be ahead of ours, never behind.
    end = max(end, *(run[0] for choice in choices for run in choice.versions))
    if start == end and all(choice.versions == ((start, len(choice.token_ids)),) for choice in choices):
        return None
    problem = next(filter(None, (_problem(choice, start) for choice in choices)), "")
    if problem:
        return Versions(((),) * len(choices), min(end, LARGEST - 1), problem)
    return Versions(tuple(choice.versions for choice in choices), end)


def _problem(choice: SampledChoice, start: int) -> str:
    runs, where = choice.versions, f"choice {choice.index}"
    if any(not 0 <= version < LARGEST or count <= 0 for version, count in runs):
        return f"versions: an entry of {where} is none"
    with_version = sum(count for _, count in runs)
    if with_version != len(choice.token_ids):
        return f"versions: {where} has {len(choice.token_ids)} token ids, {with_version} of them with a version"
    if any(later <= earlier for (earlier, _), (later, _) in pairwise(runs)):
        return f"versions: those of {where} go back"
    if runs and runs[0][0] < start:
        return (
            f"versions: {where} was sampled under version {runs[0][0]}, older than {start} which it was forwarded "
            "under; the engine serves other weights than were published last"
        )
    return ""


def _as_arrived(choice: SampledChoice, arrived: Arrived, end: int) -> Runs:
    runs: list[tuple[int, int]] = []
    done = 0
    for version, counts in (*arrived, (end, {choice.index: len(choice.token_ids)})):
        count = counts.get(choice.index, 0) - done
        if count:
            if runs and version <= runs[-1][0]:
                return ()  # somebody went back to older weights: the oldest counts
            runs.append((version, count))
            done += count
    return tuple(runs)
