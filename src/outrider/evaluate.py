"""Held-out measurement: plans evaluation rollouts and sums them up with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.config import RunConfig
from outrider.protocols import Observer
from outrider.types import Json, Mode, Rollout, Task

Z95 = 1.959963984540054


def wilson(successes: float, n: float) -> tuple[float, float]:
    """95% confidence interval of a proportion (Wilson 1927): sane at 0, at 1 and for small n. (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n)) / (1 + Z95**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def clustered(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """95% confidence interval of the success rate on tasks like these, from the (successes, tries) of each task.

    Tries of one task succeed and fail together, so that n of them tell less than n tasks would: Wilson's interval for
    the n that independent tries would need for the same variance (Kish 1965; Korn & Graubard 1998; Dean & Pagano 2015
    compare such intervals). The variance is the cluster-robust one, over tasks (Miller 2024, Adding Error Bars to
    Evals, arXiv:2411.00640). With one try a task it is `wilson` itself.
    """
    counts = [(successes, tries) for successes, tries in counts if tries]
    n = sum(tries for _, tries in counts)
    successes = sum(count for count, _ in counts)
    if n == 0:
        return 0.0, 1.0
    p, tasks = successes / n, len(counts)
    enough = n * n / sum(tries * tries for _, tries in counts)  # were all tries of a task the same: the tasks alone
    between = sum((count - p * tries) ** 2 for count, tries in counts)
    if between and tasks > 1:
        variance = tasks / (tasks - 1) * between / n**2
        enough = min(max(p * (1 - p) / variance, enough), n)
    elif 0 < p < 1 and tasks > 1:
        enough = n  # every task has the same rate, so they have nothing in common that others lack
    return wilson(p * enough, enough)


def measure(
    name: str,
    config: RunConfig,
    tasks: Sequence[Task],
    *,
    step: int,
    policy_version: int,
    run: Callable[[Sequence[Rollout]], list[Rollout]],
    failures: Callable[[], dict[str, int]],
    observer: Observer,
) -> Json:
    """Run the held-out tasks through `run` and return the ``eval`` record of metrics.jsonl, without its times."""
    begun = begin(name, config, tasks, step=step, policy_version=policy_version)
    observer.phase(f"evaluate {name}", len(begun.rollouts))
    return begun.record(run(begun.rollouts), config.reward.success) | {"failures": failures()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """An evaluation that has begun: the weights it is of, and the rollouts it needs."""

    name: str
    step: int
    policy_version: int
    rollouts: tuple[Rollout, ...]

    def record(self, ended: Sequence[Rollout], threshold: float) -> Json:
        """The ``eval`` record, but for its times and failures."""
        found: Json = {"kind": "eval", "name": self.name, "step": self.step, "policy_version": self.policy_version}
        for kind in ("greedy", "sampled"):
            mine = [rollout for rollout in ended if rollout.split == f"{self.name}/{kind}"]
            found[kind] = summarise(mine, threshold)
        return found


def begin(name: str, config: RunConfig, tasks: Sequence[Task], *, step: int, policy_version: int) -> Measurement:
    """Plan the held-out rollouts; nothing runs yet."""
    planned = plan(name, step, tasks[: config.eval.limit or None], config.eval.samples)
    return Measurement(name=name, step=step, policy_version=policy_version, rollouts=tuple(planned))


def plan(name: str, step: int, tasks: Sequence[Task], samples: int) -> list[Rollout]:
    """One greedy rollout a task and `samples` at temperature 1, which a seed of the harness must not make the same."""
    rollouts = []
    kinds: tuple[tuple[str, int, Json], ...] = (
        ("greedy", 1, {"temperature": 0.0}),
        ("sampled", samples, {"temperature": 1.0, "seed": None}),
    )
    for kind, count, sampling in kinds:
        for index in range(count):
            rollouts += [
                Rollout(
                    id=f"{name}-{step:04d}-{kind}-{task.id}" + (f"-{index}" if kind == "sampled" else ""),
                    task=task,
                    group_id=f"{name}-{step:04d}-{kind}-{task.id}",
                    split=f"{name}/{kind}",
                    step=step,
                    mode=Mode.EVAL,
                    sampling=sampling,
                )
                for task in tasks
            ]
    return rollouts


def score(record: Json) -> tuple[float, float] | None:
    """What an ``eval`` record is ranked by: greedy success, then sampled; None where nothing was scored."""
    rates = [(record[kind]["success"] if record[kind]["n"] else None) for kind in ("greedy", "sampled")]
    known = [rate for rate in rates if rate is not None]
    return (known[0], known[-1]) if known else None


def summarise(rollouts: Sequence[Rollout], threshold: float) -> Json:
    """Success rate of the scored ones, which are `n` tries of `tasks` tasks; those without a reward are counted apart
    and are never zeros."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    successes, tries = Counter[str](), Counter[str]()
    for rollout in rollouts:
        if rollout.reward is not None:
            tries[rollout.task.id] += 1
            successes[rollout.task.id] += rollout.reward >= threshold
    low, high = clustered([(successes[task], count) for task, count in tries.items()])
    return {
        "success": successes.total() / len(rewards) if rewards else 0.0,
        "n": len(rewards),
        "tasks": len(tries),
        "low": low,
        "high": high,
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
        "unscored": len(rollouts) - len(rewards),
    }
