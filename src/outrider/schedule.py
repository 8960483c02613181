"""Which groups a step trains on, and how far rollouts may run ahead of the weights.

Groups are numbered 0, 1, 2, … and handed out whole. With `ahead` = 0 a step's groups are submitted when the step begins
and all of them are sampled by its policy: synchronous training. With `ahead` = k, groups of the next k steps are in
flight as well, so that a slow rollout holds nothing up: it is trained by a later step, at most k policy versions too
old, or dropped. The bound holds at admission (at most ``(ahead + 1) * per_step`` groups are open at a time) and again
at batching, by the oldest token (`train.py`).

    sync            ahead 0, rollouts run only while the trainer waits for them
    collocated      ahead k, the same, for one machine that cannot train and sample at once: rollouts that are under way
                    when a step is full wait at the paused gateway, and go on with the new weights
    disaggregated   ahead k, rollouts run in a thread of their own, while the trainer trains

AReaL (arXiv:2505.24298) describes the admission rule; Kimi k1.5 (arXiv:2501.12599) the carry-over of long rollouts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.protocols import Sampler
from outrider.reconcile import Reconciler
from outrider.types import Rollout

NO_SIGNAL = "group: no signal, replaced"
IDLE_S = 1.0
"""How long the rollout thread sleeps at most when there is nothing to run: it then looks whether the run shall end."""
PATIENCE_S = 0.1
"""How long it waits for a rollout to end before it looks for new groups to start."""

Mode = Literal["sync", "collocated", "disaggregated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task, all of them ended."""

    index: int
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """What a resumed run needs to go on: the next group to submit, and those submitted and not yet handed out."""

    next: int = 0
    open: tuple[int, ...] = ()


class Scheduler:
    """Keeps groups in flight and hands them out whole. Use as a context manager.

    `plan(index, task_index)` gives the rollouts of a group. Where `has_signal` is given, a group of which it says no is
    dropped as soon as it is ready and another one is admitted in its place (DAPO's dynamic sampling, arXiv:2503.14476),
    up to `oversample` times the groups of a step. `extra` more groups are kept in flight, so that a step need not wait
    for replacements that start when it already lacks them. `refresh` gives a rollout that ended as it is known now.

    `too_old`, given the rollout ids of a group, says why it can't be trained any more, or nothing. Groups that have
    been passed over by more steps than `ahead` are asked about when a step begins, and given up before they end: they
    would take room from others.

    One thread at a time works with the reconciler: the caller's, or in the background the scheduler's own.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        plan: Callable[[int, int], list[Rollout]],
        sampler: Sampler,
        *,
        mode: Mode,
        per_step: int,
        ahead: int,
        has_signal: Callable[[Group], bool] | None = None,
        oversample: float = 3.0,
        extra: int = 0,
        position: Position | None = None,
        refresh: Callable[[Rollout], Rollout] = lambda rollout: rollout,
        too_old: Callable[[Sequence[str]], str] = lambda rollout_ids: "",
    ) -> None:
        self._reconciler, self._plan, self._sampler, self._refresh = reconciler, plan, sampler, refresh
        self._too_old = too_old
        self._per_step, self._ahead = per_step, 0 if mode == "sync" else ahead
        self._limit = per_step * (self._ahead + 1) + extra
        self._has_signal, self._tries = has_signal or (lambda group: True), int(per_step * oversample)
        self._background = mode == "disaggregated"
        position = position or Position()
        self._next = position.next
        self._restored = list(position.open)
        self._open: dict[int, list[str]] = {}
        self._taken = 0
        self._step = 0
        self._since: dict[int, int] = {}
        """In which step each open group was asked for."""
        self._asked: list[Rollout] = []
        """Not handed to the reconciler yet."""
        self._given_up: list[str] = []
        """Rollouts that the reconciler shall give up."""
        self._ended: dict[str, Rollout] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.dropped: Counter[str] = Counter()
        """Groups that were left out, by reason, since the last `take`."""
        self.handed_out: list[int] = []
        """Groups that the sampler was told of since then, in this order; also those that were left out in the end."""

    def __enter__(self) -> Scheduler:
        if self._background:
            self._thread = threading.Thread(target=self._pump, name="rollouts", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._reconciler.cancel()

    def position(self) -> Position:
        """Where a run would go on from here."""
        with self._changed:
            return Position(next=self._next, open=tuple(sorted([*self._restored, *self._open])))

    def take(self) -> list[Group]:
        """Wait until the groups of one step are ready. Returns fewer when `oversample` times as many had no signal."""
        self.dropped.clear()
        self.handed_out.clear()
        with self._changed:
            self._taken = 0  # the last step's weights are published: its groups make room for as many new ones
            self._step += 1
            self._changed.notify_all()
        self._give_up_old_ones()
        taken: list[Group] = []
        while len(taken) < self._per_step and len(taken) + self.dropped[NO_SIGNAL] < self._tries:
            group = self._next_ready()
            if self._has_signal(group):
                taken.append(group)
            else:
                self._drop(NO_SIGNAL)
        return taken

    def replace(self, reason: str) -> Group:
        """Drop a group that was taken, for `reason`, and wait for another one in its place."""
        self._drop(reason)
        group = self._next_ready()
        while self.dropped[NO_SIGNAL] < self._tries and not self._has_signal(group):
            self._drop(NO_SIGNAL)
            group = self._next_ready()
        return group

    def start(self, rollouts: Sequence[Rollout]) -> None:
        """Take in rollouts that belong to no group, such as an evaluation, beside whatever is in flight.

        In the background they run from now on, else while somebody waits.
        """
        with self._changed:
            self._asked += rollouts
            self._changed.notify_all()

    def finish(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Wait until rollouts that were given to `start` have ended, and hand them over in this order."""
        self._until(lambda: all(rollout.id in self._ended for rollout in rollouts), admit=False)
        return [self._ended.pop(rollout.id) for rollout in rollouts]

    def _give_up_old_ones(self) -> None:
        with self._changed:
            passed_over = {i: self._open[i] for i, since in self._since.items() if self._step - since > self._ahead}
        for index, rollout_ids in passed_over.items():
            reason = self._too_old(rollout_ids)
            if reason:
                self.dropped[reason] += 1
                with self._changed:
                    self._given_up += self._open.pop(index)
                    del self._since[index]
                    self._changed.notify_all()

    def _drop(self, reason: str) -> None:
        self.dropped[reason] += 1
        with self._changed:
            self._taken -= 1  # or a synchronous step, whose groups are all taken, would have no room for another
            self._changed.notify_all()

    def _next_ready(self) -> Group:
        self._until(lambda: self._ready_index() is not None, admit=True)
        with self._changed:
            index = self._ready_index()
            assert index is not None
            rollouts = [self._refresh(self._ended.pop(rollout_id)) for rollout_id in self._open.pop(index)]
            del self._since[index]
            group = Group(index=index, rollouts=tuple(rollouts))
            self._taken += 1
            self.handed_out.append(index)
            self._sampler.observe(group.rollouts)
            return group

    def _ready_index(self) -> int | None:
        """The oldest group that has ended; a waiting one is never overtaken by a later one that is ready too."""
        ready = (index for index, ids in self._open.items() if all(rollout_id in self._ended for rollout_id in ids))
        return min(ready, default=None)

    def _until(self, condition: Callable[[], bool], *, admit: bool) -> None:
        """Let rollouts go on, in this thread or in theirs, until `condition` holds."""
        if self._background:
            with self._changed:
                while not condition():
                    if self._error is not None:
                        raise self._error
                    self._changed.wait()
        else:
            while not condition():
                if admit:
                    self._admit()
                self._go_on()

    # -- the side that works with the reconciler ---------------------------------------------------------------------

    def _pump(self) -> None:
        """The background thread: sleeps when there is neither room for a group nor anything to run."""
        try:
            while True:
                with self._changed:
                    self._admit()
                    if not self._asked and not self._given_up and self._reconciler.idle and not self._closing:
                        self._changed.wait(IDLE_S)
                        self._admit()
                    if self._closing:
                        return
                self._go_on(PATIENCE_S)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _admit(self) -> None:
        """Ask for groups up to the limit: first those that were open before a restart, then new ones."""
        while len(self._open) + self._taken < self._limit:
            if self._restored:
                index, since = self._restored.pop(0), -self._ahead  # how old it is, its tokens say
            else:
                index, since = self._next, max(1, self._step)  # before the first step is as good as in it
                self._next += 1
            self._since[index] = since
            rollouts = self._plan(index, self._sampler.choose(index))
            self._open[index] = [rollout.id for rollout in rollouts]
            self._asked += rollouts

    def _go_on(self, patience_s: float = 0.5) -> None:
        """Hand over what was asked for, wait a moment, and collect what has ended."""
        with self._changed:
            asked, self._asked = self._asked, []
            given_up, self._given_up = self._given_up, []
            for rollout_id in given_up:
                self._ended.pop(rollout_id, None)
        if asked:
            self._reconciler.submit(asked)
        if given_up:
            self._reconciler.abandon(given_up)
        self._reconciler.tick(patience_s)
        ended = self._reconciler.take()
        if ended:
            with self._changed:
                self._ended.update((rollout.id, rollout) for rollout in ended)
                self._changed.notify_all()
