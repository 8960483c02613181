"""What a step reads from the store: which groups are too old, by which token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fakes.calls import call
from fakes.memory_store import MemoryStore
from outrider.collect import Collector, over_age
from outrider.config import TrainConfig
from outrider.schedule import Group
from outrider.types import Rollout, RolloutState, Task


def group(store: MemoryStore, index: int, *versions: list[tuple[int, int]]) -> Group:
    """A rollout for each of `versions`, which has a call for each pair of versions it began and ended under."""
    rollouts = []
    for member, of_calls in enumerate(versions):
        name = f"g{index}-{member}"
        prompt = [1, 2]
        for number, (start, end) in enumerate(of_calls):
            made = call(prompt, [10 + number], id=f"{name}.{number}", attempt_id=f"{name}.a1")
            store.append_call(replace(made, version_start=start, version_end=end)).result()
            prompt = [*prompt, 10 + number, 3]
        rollouts.append(
            Rollout(
                id=name,
                task=Task(id="t", fields={}),
                group_id=f"g{index}",
                state=RolloutState.SUCCEEDED,
                attempt=1,
                reward=float(member),
            )
        )
    return Group(index=index, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    "versions",
    [
        ([(2, 2), (5, 5)], [(5, 5)]),  # the first call of one rollout
        ([(5, 5)], [(5, 5), (2, 2)]),  # the last of another
        ([(5, 5)], [(2, 5)]),  # weights were swapped within a call
    ],
)
def test_R12_one_token_that_is_too_old_takes_its_group_with_it(versions):
    store = MemoryStore()
    old, fresh = group(store, 0, *versions), group(store, 1, [(4, 4)], [(3, 5)])
    reasons = []

    def another(reason: str) -> Group:
        reasons.append(reason)
        return fresh

    found = Collector(store, TrainConfig()).collect([old], version=5, max_lag=2, another=another)
    assert reasons == [over_age(2)]
    assert {sample.group_id for sample in found.samples} == {"g1"}
    assert [rollout.id for rollout in found.rollouts] == ["g1-0", "g1-1"]
    kept = Collector(store, TrainConfig()).collect([old], version=5, max_lag=3, another=another)
    assert len(kept.rollouts) == 2
