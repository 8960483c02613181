"""From the groups of a step to what is learnt from: rewards as they are known now, rows, and what was left out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider import trajectory
from outrider.config import TrainConfig
from outrider.protocols import Store
from outrider.schedule import Group
from outrider.trajectory import SampleSet, Tree
from outrider.trajectory.leave_out import left_out
from outrider.types import Call, Failure, FloatArray, Reward, Rollout, RolloutState, Sample

FINAL = "final"
"""Name of the rewards that count."""
LATE_REWARD = "reward: came after its step was taken"
WATCHED_STEPS = 2
"""For how many steps rewards that come too late are looked for."""


@dataclass(slots=True)
class Gathered:
    """What one step trains on."""

    rollouts: list[Rollout] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    call_rewards: dict[str, FloatArray] = field(default_factory=dict)
    """By rollout id, one number for each call of its attempt, 0 where there is none; no entry where no call has one."""
    breaks: int = 0
    """See `outrider.trajectory.Tree.breaks`."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Answers, rollouts and groups, by reason."""
    excluded_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens that no row trains on, by reason; of a rollout those of its last attempt."""
    rewards_seen: dict[str, int] = field(default_factory=dict)
    """By attempt, how many rewards that count there were."""

    def sampled_tokens(self) -> int:
        """All of them, trained or not."""
        return sum(int(sample.loss_mask.sum()) for sample in self.samples) + self.excluded_tokens.total()

    def add(self, other: Gathered) -> None:
        self.rollouts += other.rollouts
        self.samples += other.samples
        self.call_rewards |= other.call_rewards
        self.breaks += other.breaks
        self.excluded.update(other.excluded)
        self.excluded_tokens.update(other.excluded_tokens)
        self.rewards_seen |= other.rewards_seen


class Collector:
    """Reads the attempts of ended rollouts from the store."""

    def __init__(self, store: Store, config: TrainConfig) -> None:
        self._store, self._config = store, config
        self._taken: deque[dict[str, int]] = deque(maxlen=WATCHED_STEPS)
        """How many rewards each attempt of the last steps had when its step was taken."""
        self._unused: Counter[str] = Counter()
        """Sampled tokens of groups that no step trains on, by reason, since the last `collect`."""

    def refresh(self, rollout: Rollout) -> Rollout:
        """`rollout` with the newest reward of its attempt, which may have come after the attempt ended.

        So a rollout whose own scoring failed counts all the same, once somebody else has scored it.
        """
        return _scored(rollout, self._store.rewards(rollout.attempt_id))

    def collect(
        self, groups: Sequence[Group], *, version: int, max_lag: int, another: Callable[[str], Group]
    ) -> Gathered:
        """The rollouts and rows of a step.

        A group with a token more than `max_lag` policy versions older than `version` is given up whole, for the one
        that `another` gives when it is told the reason. Its tokens, and those of groups that were given up before, are
        counted as excluded.
        """
        step = Gathered()
        waiting = deque(groups)
        while waiting:
            group = self.read(waiting.popleft())
            if version - _oldest(group.samples, version) > max_lag:
                self.leave_out(over_age(max_lag), group)
                waiting.append(another(over_age(max_lag)))
            else:
                step.add(group)
        step.excluded_tokens.update(self._unused)
        self._unused.clear()
        late = self._late()
        if late:
            step.excluded[LATE_REWARD] = late
        self._taken.append(step.rewards_seen)
        return step

    def leave_out(self, reason: str, group: Gathered) -> None:
        """Count the tokens of a group that is given up."""
        self._unused[reason] += group.sampled_tokens()

    def read(self, group: Group) -> Gathered:
        """What the store holds of a group by now."""
        found = Gathered()
        for ended in group.rollouts:
            rewards = self._store.rewards(ended.attempt_id)
            rollout = _scored(ended, rewards)
            found.rollouts.append(rollout)
            found.rewards_seen[ended.attempt_id] = _counting(rewards)
            if rollout.state is not RolloutState.SUCCEEDED:
                reason = f"rollout {rollout.state}: {rollout.failure}"
                found.excluded[reason] += 1
                found.excluded_tokens[reason] += _sampled(self._store.calls(rollout.attempt_id))
                continue
            calls = self._store.calls(rollout.attempt_id)
            tree = self._tree(calls)
            cut = self._cut(rollout, tree)
            found.samples += cut.samples
            found.breaks += tree.breaks
            found.excluded.update(cut.excluded)
            found.excluded_tokens.update(cut.excluded_tokens)
            given = of_calls(calls, rewards)
            if given is not None:
                found.call_rewards[rollout.id] = given
        return found

    def too_old(self, rollout_ids: Sequence[str], *, version: int, max_lag: int) -> str:
        """Why a group that is still under way can't be trained any more; empty where it can.

        The tokens it has so far are then counted as excluded.
        """
        rollouts = list(filter(None, map(self._store.rollout, rollout_ids)))
        calls = [self._store.calls(rollout.attempt_id) for rollout in rollouts]
        for rollout, made in zip(rollouts, calls, strict=True):
            if rollout.state in (RolloutState.RUNNING, RolloutState.SUCCEEDED):
                samples = self._cut(rollout, self._tree(made)).samples
                if version - _oldest(samples, version) > max_lag:
                    self._unused[over_age(max_lag)] += sum(map(_sampled, calls))
                    return over_age(max_lag)
        return ""

    def _tree(self, calls: Sequence[Call]) -> Tree:
        return trajectory.build(calls, left_out(calls, self._config.leave_out, self._config.models))

    def _cut(self, rollout: Rollout, tree: Tree) -> SampleSet:
        return tree.samples(
            rollout_id=rollout.id,
            group_id=rollout.group_id,
            max_tokens=self._config.max_tokens,
            too_long=self._config.too_long,
        )

    def _late(self) -> int:
        """Rewards that came since their step was taken; each is counted once."""
        late = 0
        for step in self._taken:
            for name, known in step.items():
                step[name] = _counting(self._store.rewards(name))
                late += step[name] - known
        return late


def over_age(max_lag: int) -> str:
    """The reason under which groups that are too old are counted."""
    return f"group: over {max_lag} policy versions old"


def of_calls(calls: Sequence[Call], rewards: Sequence[Reward]) -> FloatArray | None:
    """The newest reward of each call, (number of calls,), 0 where there is none; None where no call has one."""
    given = {reward.call_id: reward.value for reward in rewards if reward.name == FINAL and reward.call_id}
    if not given:
        return None
    return np.array([given.get(call.id, 0.0) for call in calls], dtype=np.float32)


def _scored(rollout: Rollout, rewards: Sequence[Reward]) -> Rollout:
    """`rollout` with the newest of the `rewards` of its attempt as a whole."""
    final = next((reward for reward in reversed(rewards) if reward.name == FINAL and not reward.call_id), None)
    unscored = rollout.failure in (Failure.REWARD_ERROR, Failure.REWARD_INVALID)
    if final is None or not (rollout.state is RolloutState.SUCCEEDED or unscored):
        return rollout
    return replace(rollout, state=RolloutState.SUCCEEDED, reward=final.value, reason=final.reason)


def _sampled(calls: Sequence[Call]) -> int:
    """Tokens of all their answers."""
    return sum(len(choice.token_ids) for call in calls for choice in call.choices)


def _counting(rewards: Sequence[Reward]) -> int:
    """How many of them count, or would have."""
    return sum(reward.name == FINAL for reward in rewards)


def _oldest(samples: Sequence[Sample], version: int) -> int:
    """Policy version of the oldest trained token; `version` where there is none."""
    return min((int(s.versions[s.loss_mask].min()) for s in samples if s.loss_mask.any()), default=version)
