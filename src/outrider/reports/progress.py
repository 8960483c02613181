"""What a watcher knows about a run: fed by `Observer` events, asked by whatever draws it. No drawing here."""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.reports.history import counters, dig, share
from outrider.reports.text import clean, finite, fixed, number, one_line, percent, tally
from outrider.types import Failure, Json, Rollout

KEPT_STEPS = 8
KEPT_MESSAGES = 5


@dataclass(slots=True)
class Phase:
    """The phase that runs now, and what its rollouts gave so far."""

    name: str
    total: int
    """Units of it, 0 if unknown."""
    started: float
    done: int = 0
    ended_rollouts: int = 0
    rewards: list[float] = field(default_factory=list)
    successes: int = 0

    def left_s(self, now: float) -> float | None:
        """Seconds left at the mean pace so far; None before the first unit or without a total."""
        if not self.done or not self.total:
            return None
        return max(self.total - self.done, 0) * (now - self.started) / self.done


class Progress:
    """Accumulates a run's events. `clock` gives monotonic seconds."""

    def __init__(self, *, steps: int, success: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps_wanted = steps
        self.success_from = success
        self.clock = clock
        self.started = clock()
        self.steps_done = 0
        self.steps_before = 0
        """Of `steps_done`, those that an earlier start of the run did."""
        self.phase: Phase | None = None
        self.steps: deque[Json] = deque(maxlen=KEPT_STEPS)
        self.evals: dict[str, Json] = {}
        self.messages: deque[tuple[float, str]] = deque(maxlen=KEPT_MESSAGES)
        self.failures: Counter[str] = Counter()
        self.excluded: Counter[str] = Counter()
        self.retries = 0
        self._unrecorded: Counter[str] = Counter()  # failures seen since the last record, which may count them itself
        self._eval_s: float | None = None
        self._stretch_started: float | None = None  # start of the first phase since the last record

    def begin(self, name: str, total: int) -> None:
        now = self.clock()
        self.phase = Phase(one_line(name), max(total, 0), now)
        if self._stretch_started is None and total > 0:  # a start without a count is no part of a step
            self._stretch_started = now

    def advance(self, rollout: Rollout | None) -> None:
        phase = self.phase
        if phase is not None:
            phase.done += 1
        if rollout is None:
            return
        self.retries += max(rollout.attempt - 1, 0)
        if rollout.failure is not Failure.NONE:
            self._unrecorded[rollout.failure.value] += 1
        if phase is not None:
            phase.ended_rollouts += 1
            if rollout.reward is not None:
                phase.rewards.append(rollout.reward)
                phase.successes += rollout.reward >= self.success_from

    def add(self, record: Json, *, earlier: bool = False) -> None:
        """A record of metrics.jsonl, perhaps of an earlier start. One that counts failures itself replaces what was
        seen since the last one."""
        counted = counters(record, "failures") if "failures" in record else self._unrecorded
        self.failures.update(counted)
        self._unrecorded = Counter()
        self.excluded.update(counters(record, "excluded"))
        kind = record.get("kind")
        if kind == "step":
            self.steps.append(record)
            self.steps_done = int(finite(record.get("step")) or self.steps_done)
            self.steps_before = self.steps_done if earlier else self.steps_before
        elif kind == "eval":
            self.evals[one_line(str(record.get("name")), 24)] = record
            if self._stretch_started is not None:
                self._eval_s = self.clock() - self._stretch_started
        self._stretch_started = None

    def say(self, text: str) -> None:
        self.messages.append((time.time(), one_line(text, 300)))

    def elapsed_s(self) -> float:
        return self.clock() - self.started

    def all_failures(self) -> Counter[str]:
        return self.failures + self._unrecorded

    def left_s(self) -> float | None:
        """Seconds until the end of the run: the steps left at the median pace, and the evaluation after them.

        None until a step is done. Evaluations between steps are not foreseen.
        """
        paces = [seconds for record in self.steps if (seconds := finite(dig(record, "times", "total"))) is not None]
        if not paces:
            return None
        left = statistics.median(paces) * max(self.steps_wanted - self.steps_done, 0)
        if "after" not in self.evals:
            left += self._eval_s or 0.0
        if self._stretch_started is not None:
            left -= self.clock() - self._stretch_started
        return max(left, 0.0)


def skipped_groups(record: Json) -> str:
    """``6/8``: groups trained of all, since the others had no variance or no samples."""
    if finite(record.get("groups")) is None:
        return "–"
    return f"{number(record.get('groups_trained'))}/{number(record['groups'])}"


def eval_words(record: Json) -> str:
    """``greedy 69% (62–75) n 200, sampled 16% (12–22) n 200``: 95% intervals in brackets."""
    parts = []
    for how in ("greedy", "sampled"):
        found = share(record, how)
        if found is not None:
            low, high = percent(found.low).removesuffix("%"), percent(found.high).removesuffix("%")
            parts.append(f"{how} {percent(found.value)} ({low}–{high}) n {found.n}")
        unscored = finite(dig(record, how, "unscored"))
        if unscored:
            parts.append(f"{how} without reward {number(unscored)}")
    return ", ".join(parts) or "nothing measured"


def learning_words(record: Json) -> list[str]:
    """What to keep an eye on in a step's update: engine against trainer, and the critic and correction where used."""
    words = []
    if finite(record.get("logprob_diff_mean")) is not None:
        mean, largest = number(record["logprob_diff_mean"]), number(record.get("logprob_diff_max"))
        words.append(f"engine − trainer {mean} nats (max {largest})")
    if isinstance(record.get("mismatch"), dict):
        mean, masked = (dig(record, "mismatch", name) for name in ("weight_mean", "masked"))
        words.append(f"weight {number(mean)} masked {percent(masked)}")
    if finite(record.get("value_loss")) is not None:
        explained = number(record.get("value_explained_variance"))
        words.append(f"value loss {number(record['value_loss'])} explains {explained}")
    return words


def step_words(record: Json, steps: int) -> str:
    """One plain line on a step."""
    words = [
        f"step {number(record.get('step'))}/{steps}",
        f"reward {fixed(record.get('reward_mean'))} ± {fixed(record.get('reward_std'))}",
        f"success {percent(record.get('success'))}",
        f"loss {fixed(record.get('loss'), 4)}",
        f"{number(record.get('tokens_per_s'))} tok/s",
        f"{fixed(dig(record, 'times', 'total'), 1)} s",
        f"groups trained {skipped_groups(record)}",
        *learning_words(record),
    ]
    for name in ("excluded", "failures"):
        counts = counters(record, name)
        if counts:
            words.append(f"{name}: {tally(counts)}")
    return clean("  ".join(words))
