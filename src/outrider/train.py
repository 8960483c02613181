"""The training loop, read from top to bottom: roll out, join, credit, update, publish.

Which groups a step gets, and how old their tokens may be, is the scheduler's matter (`schedule.py`). The checkpoint of
a step is written in the background while the rollouts of the next one run, since nothing touches the weights meanwhile;
a step is finished when its checkpoint is complete. After a crash the trainer goes on from the last finished step.
Rollouts that had ended by then lie in the store and are taken as they are, so none is paid for or counted twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from outrider import evaluate, trajectory
from outrider.config import RunConfig
from outrider.errors import EngineError, Interrupted, RunError
from outrider.learn import Learner
from outrider.memory import MemoryWatch
from outrider.metrics import Timer, rollout_record, update_record
from outrider.protocols import (
    Backend,
    Engine,
    GatewayControl,
    Observer,
    Sampler,
    Store,
)
from outrider.reconcile import Reconciler
from outrider.runfolder import RunFolder
from outrider.schedule import Group, Position, Scheduler
from outrider.trajectory.leave_out import left_out
from outrider.types import Json, Rollout, RolloutState, Sample, Task

PUBLISH_TRIES = 3
DRAIN_S = 30.0
"""How long calls in flight may take to end before weights are swapped under them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a trainer works with; put together by the command line, or by a test."""

    store: Store
    reconciler: Reconciler
    backend: Backend
    engine: Engine
    gateway: GatewayControl
    observer: Observer
    folder: RunFolder
    stop: threading.Event
    services_up: Callable[[], None]
    """Returns when no service is down."""
    memory: MemoryWatch


@dataclass(slots=True)
class Progress:
    """Where the run is. Shared with whoever restarts the engine, which must come back with these weights."""

    step: int = 0
    policy_version: int = 0


class Trainer:
    """Trains `config.train.steps` steps with an evaluation before and after."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        tasks: Sequence[Task],
        held_out: Sequence[Task],
        progress: Progress,
        sampler: Sampler,
    ) -> None:
        self.config = config
        self.parts = parts
        self.tasks = list(tasks)
        self.held_out = list(held_out)
        self.progress = progress
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._sampler = sampler
        self._learner = Learner(
            config.train, parts.backend, parts.observer, self._check_stop, success=config.reward.success
        )
        self._wall_base = max((record["wall_s"] for record in parts.folder.records()), default=0.0)
        self._began = time.monotonic()

    def run(self) -> Json:
        """Train to the end. Returns ``{"before", "after", "wall_s"}``. Raises `RunError` and `Interrupted`."""
        try:
            with self._scheduler(self._restore()) as scheduler:
                before = self._evaluate("before", scheduler)
                while self.progress.step < self.config.train.steps:
                    self._step(self.progress.step + 1, scheduler)
                    every = self.config.eval.every
                    if every and self.progress.step % every == 0 and self.progress.step < self.config.train.steps:
                        self._evaluate(f"step-{self.progress.step}", scheduler)
                self._await_checkpoint()
                after = self._evaluate("after", scheduler)
        finally:
            self._saver.shutdown(wait=True)  # a checkpoint that was begun is worth a few seconds
        return {"before": before, "after": after, "wall_s": self._wall()}

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self, step: int, scheduler: Scheduler) -> None:
        timer = Timer()
        config = self.config.train
        self._phase(f"step {step}: rollouts", config.groups * config.group_size)
        groups = scheduler.take()
        timer.lap("rollouts")
        rollouts, samples, excluded = self._collect(groups, scheduler)
        if config.schedule == "collocated":
            self.parts.gateway.pause(timeout_s=DRAIN_S)  # one machine: what is under way waits while it trains
        batch = self._learner.batch(rollouts, samples)
        excluded.update(batch.excluded)
        timer.lap("samples")
        record = rollout_record(step, rollouts, samples, batch, self.config.reward.success)
        if batch.rows:
            self._phase(f"step {step}: update", config.epochs)
            # The last step's weights must be on disk before they change.
            update = self._learner.update(step, batch, timer, before_change=self._await_checkpoint)
            self._publish()
            timer.lap("publish")
            record |= update_record(update.stats, update.optim) | update.record()
            excluded.update(update.excluded)
        else:
            self.parts.gateway.resume(self.progress.policy_version)
            record |= {"skipped": True, "tokens": 0, "tokens_computed": 0}
            self._say(f"step {step} has nothing to learn from ({_counts(excluded)}); weights stay as they are")
        self.progress.step = step
        record |= self._learner.record()
        record["policy_version"] = self.progress.policy_version
        record["excluded"] = dict(excluded)
        record["failures"] = self.parts.reconciler.take_failures()
        self._await_checkpoint()
        self._record(record | {"times": timer.times()})
        self._saving = self._saver.submit(
            self._checkpoint, step, self.progress.policy_version, asdict(scheduler.position())
        )

    def _collect(
        self, groups: Sequence[Group], scheduler: Scheduler
    ) -> tuple[list[Rollout], list[Sample], Counter[str]]:
        """The rollouts and rows of `groups`, where one with a token that is too old is replaced as a whole."""
        rollouts: list[Rollout] = []
        samples: list[Sample] = []
        excluded: Counter[str] = Counter()
        waiting = list(groups)
        while waiting:
            group = waiting.pop(0)
            rows, left_out = self._samples(group.rollouts)
            if self._lag(rows) > self._max_lag():
                waiting.append(scheduler.replace(f"group: over {self._max_lag()} policy versions old"))
                continue
            rollouts += group.rollouts
            samples += rows
            excluded.update(left_out)
        excluded.update(scheduler.dropped)
        return rollouts, samples, excluded

    def _lag(self, samples: Sequence[Sample]) -> int:
        """Policy versions between the oldest trained token and the weights that are about to change."""
        oldest = [int(sample.versions[sample.loss_mask].min()) for sample in samples if sample.loss_mask.any()]
        return self.progress.policy_version - min(oldest, default=self.progress.policy_version)

    def _max_lag(self) -> int:
        return 0 if self.config.train.schedule == "sync" else self.config.train.max_staleness

    def _samples(self, rollouts: Sequence[Rollout]) -> tuple[list[Sample], Counter[str]]:
        """Cut the training rows of every scored rollout from its calls."""
        config = self.config.train
        samples: list[Sample] = []
        excluded: Counter[str] = Counter()
        for rollout in rollouts:
            if rollout.state is not RolloutState.SUCCEEDED:
                excluded[f"rollout {rollout.state}: {rollout.failure}"] += 1
                continue
            calls = self.parts.store.calls(f"{rollout.id}.a{rollout.attempt}")
            tree = trajectory.build(calls, left_out(calls, config.leave_out, config.models))
            cut = tree.samples(
                rollout_id=rollout.id,
                group_id=rollout.group_id,
                max_tokens=config.max_tokens,
                too_long=config.too_long,
            )
            samples += cut.samples
            excluded.update(cut.excluded)
        return samples, excluded

    def _publish(self) -> None:
        """Give the engine the present weights. The version counts only once the engine serves them."""
        version = self.progress.policy_version + 1
        weights = self.parts.backend.publish(self.parts.folder.weights_dir(version))
        for attempt in range(1, PUBLISH_TRIES + 1):
            self.parts.services_up()
            try:
                # Calls in flight go on under the new weights where rollouts run beside the trainer, and are marked as
                # mixed by their two versions; else they end first.
                beside = self.config.train.schedule == "disaggregated"
                self.parts.gateway.pause(timeout_s=0.0 if beside else DRAIN_S)
                self.parts.engine.load_weights(weights, version)
                break
            except EngineError as error:
                self._say(f"publish of version {version} failed ({error}), attempt {attempt} of {PUBLISH_TRIES}")
                if attempt == PUBLISH_TRIES:
                    raise RunError(f"cannot publish version {version}: {error}") from error
        self.progress.policy_version = version  # first, so that an engine restarted from here on loads these
        self.parts.gateway.resume(version)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self, name: str, scheduler: Scheduler) -> Json:
        """Measure on the held-out tasks, or return what an earlier start of this run measured."""
        done = self.parts.folder.evaluation(name)
        if done is not None and (name != "after" or done["step"] == self.progress.step):
            self.parts.observer.record(done)
            return done
        self._check_stop()
        record = evaluate.measure(
            name,
            self.config,
            self.held_out,
            step=self.progress.step,
            policy_version=self.progress.policy_version,
            run=scheduler.run,
            failures=self.parts.reconciler.take_failures,
            observer=self.parts.observer,
        )
        self._record(record)
        return record

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _restore(self) -> Position:
        """Go back to the last finished step; returns where the scheduler stood then."""
        folder = self.parts.folder
        checkpoint = folder.latest()
        position = Position()
        if checkpoint is None:
            folder.forget_after(0)
        else:
            self.parts.backend.load(checkpoint.path)
            self.progress.step, self.progress.policy_version = checkpoint.step, checkpoint.policy_version
            folder.forget_after(checkpoint.step)
            position = Position(next=checkpoint.position["next"], open=tuple(checkpoint.position["open"]))
            self._say(f"going on after step {checkpoint.step}, policy version {checkpoint.policy_version}")
        self.parts.gateway.resume(self.progress.policy_version)
        for record in folder.records():
            if record["kind"] == "step":
                self.parts.observer.record(record)
                self._learner.recall(record)
        return position

    def _scheduler(self, position: Position) -> Scheduler:
        config = self.config.train
        for rollout in self.parts.store.rollouts(split="train", state=RolloutState.SUCCEEDED):
            self._sampler.observe([rollout])
        return Scheduler(
            self.parts.reconciler,
            lambda index, task: plan_group(self.config, self.tasks[task], index),
            self._sampler,
            mode=config.schedule,
            per_step=config.groups,
            ahead=config.max_staleness,
            keep_signal=config.dynamic_filter,
            oversample=config.oversample,
            position=position,
        )

    def _checkpoint(self, step: int, version: int, position: Json) -> None:
        folder = self.parts.folder
        self.parts.backend.save(folder.checkpoint_dir(step))
        folder.finish_step(step, version, folder.weights_dir(version), position)
        folder.prune(self.config.train.keep_checkpoints)

    def _await_checkpoint(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    # -- telling ---------------------------------------------------------------------------------------------------

    def _record(self, record: Json) -> None:
        if "times" in record:
            seconds = record["times"]["rollouts"]
            record["tokens_per_s"] = record["sampled_tokens"] / seconds if seconds else 0.0
        record |= {"wall_s": self._wall(), "peak_rss_bytes": self.parts.memory.peak}
        self.parts.folder.append(record)
        self.parts.observer.record(record)

    def _wall(self) -> float:
        """Seconds this run has taken, earlier starts included up to their last record."""
        return self._wall_base + time.monotonic() - self._began

    def _phase(self, name: str, total: int) -> None:
        self._check_stop()
        self.parts.observer.phase(name, total)

    def _say(self, text: str) -> None:
        self.parts.observer.message(text)

    def _check_stop(self) -> None:
        if self.parts.stop.is_set():
            self._await_checkpoint()
            raise Interrupted("stopped on request")


def plan_group(config: RunConfig, task: Task, index: int) -> list[Rollout]:
    """The rollouts of group number `index`. Ids follow from the number: a resumed run asks for the same ones."""
    step, place = index // config.train.groups + 1, index % config.train.groups
    group_id = f"step-{step:04d}-{place:03d}"
    return [
        Rollout(
            id=f"{group_id}-{member}",
            task=task,
            group_id=group_id,
            split="train",
            step=step,
            sampling={"temperature": config.train.temperature},
        )
        for member in range(config.train.group_size)
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counter.most_common()) or "no reason counted"
