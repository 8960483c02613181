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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from outrider import evaluate
from outrider.collect import Collector
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
from outrider.schedule import NO_SIGNAL, Group, Position, Scheduler
from outrider.types import Json, Rollout, RolloutState, Task

PUBLISH_TRIES = 3
DRAIN_S = 30.0
"""How long calls in flight may take to end before weights are swapped under them."""
PLAIN_SAMPLING: Mapping[str, Any] = MappingProxyType(
    {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
    }
)
"""Put over what a harness, or the model's own defaults, ask for in training rollouts. Log-probs are recomputed at the
temperature and in no other way, so an answer from a cut or penalised distribution would look as if other weights had
sampled it; and with a fixed seed all rollouts of a group would be the same one."""


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
        self._measuring: evaluate.Measurement | None = None
        self._sampler = sampler
        self._collector = Collector(parts.store, config.train)
        self._learner = Learner(
            config.train, parts.backend, parts.observer, self._check_stop, success=config.reward.success
        )
        self._wall_base = max((record["wall_s"] for record in parts.folder.records()), default=0.0)
        self._began = time.monotonic()

    def run(self) -> Json:
        """Train to the end. Returns ``{"before", "after", "wall_s", "best"}``. Raises `RunError` and `Interrupted`."""
        try:
            with self._scheduler(self._restore()) as scheduler:
                before = self._evaluate("before", scheduler)
                while self.progress.step < self.config.train.steps:
                    self._evaluate_between(scheduler)
                    self._step(self.progress.step + 1, scheduler)
                self._await_checkpoint()
                after = self._evaluate("after", scheduler)
        finally:
            self._saver.shutdown(wait=True)  # a checkpoint that was begun is worth a few seconds
        return {"before": before, "after": after, "wall_s": self._wall(), "best": self.parts.folder.best()}

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self, step: int, scheduler: Scheduler) -> None:
        timer = Timer()
        config = self.config.train
        self._phase(f"step {step}: rollouts", config.groups * config.group_size)
        groups = scheduler.take()
        timer.lap("rollouts")
        found = self._collector.collect(
            groups,
            version=self.progress.policy_version,
            max_lag=self._max_lag(),
            another=lambda reason: self._another(scheduler, timer, reason),
        )
        excluded = found.excluded + scheduler.dropped
        if config.schedule == "collocated":
            self._pause(DRAIN_S)  # one machine: what is under way waits while it trains
        batch = self._learner.batch(found.rollouts, found.samples, found.call_rewards)
        excluded.update(batch.excluded)
        timer.lap("samples")
        record = rollout_record(step, found.rollouts, found.samples, batch, self.config.reward.success)
        record |= {"breaks": found.breaks, "excluded_tokens": dict(found.excluded_tokens + batch.excluded_tokens)}
        if batch.rows:
            self._phase(f"step {step}: update", config.epochs)
            # The last step's weights must be on disk before they change.
            update = self._learner.update(step, batch, timer, before_change=self._await_checkpoint)
            if self._measuring is not None:
                self._finish_measuring(scheduler)
                timer.skip()
            self._publish()
            timer.lap("publish")
            record |= update_record(update.stats, update.optim) | update.record()
            excluded.update(update.excluded)
        else:
            # No update, so nothing is published and the version stays: it counts weights, not steps.
            self._resume()
            record |= {"skipped": True, "loss": 0.0, "tokens": 0, "tokens_computed": 0}
            self._say(f"step {step} has nothing to learn from ({_counts(excluded)}); weights stay as they are")
            if self._measuring is not None:
                self._finish_measuring(scheduler)
        self.progress.step = step
        record |= self._learner.record()
        record["policy_version"] = self.progress.policy_version
        record["excluded"] = dict(excluded)
        record["handed_out"] = list(scheduler.handed_out)
        record["failures"] = self.parts.reconciler.take_failures()
        self._await_checkpoint()
        self._record(record | {"times": timer.times()})
        self._saving = self._saver.submit(
            self._checkpoint, step, self.progress.policy_version, asdict(scheduler.position())
        )

    def _another(self, scheduler: Scheduler, timer: Timer, reason: str) -> Group:
        timer.lap("samples")
        group = scheduler.replace(reason)
        timer.lap("rollouts")
        return group

    def _has_signal(self, group: Group) -> bool:
        found = self._collector.read(group)
        has_signal = self._learner.has_signal(found.rollouts, found.samples, found.call_rewards)
        if not has_signal:
            self._collector.leave_out(NO_SIGNAL, found)
        return has_signal

    def _max_lag(self) -> int:
        return 0 if self.config.train.schedule == "sync" else self.config.train.max_staleness

    def _publish(self) -> None:
        """Give the engine the present weights. The version counts only once the engine serves them."""
        version = self.progress.policy_version + 1
        weights = self.parts.backend.publish(self.parts.folder.weights_dir(version))
        for attempt in range(1, PUBLISH_TRIES + 1):
            try:
                # Calls in flight go on under the new weights where rollouts run beside the trainer, and each of their
                # tokens keeps its version; else they end first.
                beside = self.config.train.schedule == "disaggregated"
                self._pause(0.0 if beside else DRAIN_S)
                self.parts.engine.load_weights(weights, version)
                break
            except EngineError as error:
                self._say(f"publish of version {version} failed ({error}), attempt {attempt} of {PUBLISH_TRIES}")
                if attempt == PUBLISH_TRIES:
                    raise RunError(f"cannot publish version {version}: {error}") from error
        self.progress.policy_version = version  # first, so that an engine restarted from here on loads these
        self._resume()

    def _pause(self, timeout_s: float) -> None:
        """No call is admitted from here on, and no agent's time runs: a step may take longer than its limit."""
        self.parts.reconciler.hold_time(True)
        self.parts.services_up()
        self.parts.gateway.pause(timeout_s=timeout_s)

    def _resume(self) -> None:
        self.parts.services_up()
        self.parts.gateway.resume(self.progress.policy_version)
        self.parts.reconciler.hold_time(False)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self, name: str, scheduler: Scheduler) -> Json:
        """Measure on the held-out tasks, or return what an earlier start of this run measured."""
        done = self._measured(name)
        if done is not None:
            return done
        self._begin_measuring(name, scheduler)
        return self._finish_measuring(scheduler)

    def _evaluate_between(self, scheduler: Scheduler) -> None:
        """Begin what is due before the next step. Where rollouts run beside the trainer it may last until a publish."""
        step, every = self.progress.step, self.config.eval.every
        if every and step and step % every == 0 and self._measured(f"step-{step}") is None:
            self._begin_measuring(f"step-{step}", scheduler)
            if self.config.train.schedule != "disaggregated":
                self._finish_measuring(scheduler)

    def _measured(self, name: str) -> Json | None:
        done = self.parts.folder.evaluation(name)
        if done is None or (name == "after" and done["step"] != self.progress.step):
            return None
        self.parts.observer.record(done, earlier=True)
        return done

    def _begin_measuring(self, name: str, scheduler: Scheduler) -> None:
        self._check_stop()
        step, version = self.progress.step, self.progress.policy_version
        self._measuring = evaluate.begin(name, self.config, self.held_out, step=step, policy_version=version)
        self._phase(f"evaluate {name}", len(self._measuring.rollouts))
        scheduler.start(self._measuring.rollouts)

    def _finish_measuring(self, scheduler: Scheduler) -> Json:
        """Wait for the evaluation that has begun. Until then its weights must stay."""
        measuring, self._measuring = self._measuring, None
        assert measuring is not None
        record = measuring.record(scheduler.finish(measuring.rollouts), self.config.reward.success)
        # Of attempts that failed beside a step's the step counts all.
        beside = self.config.train.schedule == "disaggregated" and measuring.name not in ("before", "after")
        record["failures"] = {} if beside else self.parts.reconciler.take_failures()
        if self.config.eval.keep_best and self._is_best(record):
            record["best"] = True
        self._record(record)
        return record

    def _is_best(self, record: Json) -> bool:
        """Keep the weights that were measured if none did better. Version 0 is the model the run began with."""
        folder, version = self.parts.folder, record["policy_version"]
        score = evaluate.score(record)
        best = folder.best()
        if score is None or version == 0 or (best is not None and tuple(best["score"]) >= score):
            return False
        folder.keep_best(
            folder.weights_dir(version),
            {"name": record["name"], "step": record["step"], "policy_version": version, "score": score},
        )
        return True

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
            self._remind_sampler()
            self._say(f"going on after step {checkpoint.step}, policy version {checkpoint.policy_version}")
        self._resume()
        for record in folder.records():
            if record["kind"] == "step":
                self.parts.observer.record(record, earlier=True)
                self._learner.recall(record)
        return position

    def _scheduler(self, position: Position) -> Scheduler:
        config = self.config.train
        return Scheduler(
            self.parts.reconciler,
            lambda index, task: plan_group(self.config, self.tasks[task], index),
            self._sampler,
            mode=config.schedule if self.progress.step < config.steps else "sync",  # nothing is left to run ahead for
            per_step=config.groups,
            ahead=config.max_staleness,
            has_signal=self._has_signal if config.dynamic_filter else None,
            oversample=config.oversample,
            extra=config.extra_groups,
            position=position,
            refresh=self._collector.refresh,
            too_old=lambda ids: self._collector.too_old(
                ids, version=self.progress.policy_version, max_lag=self._max_lag()
            ),
        )

    def _remind_sampler(self) -> None:
        """Tell it of the groups of finished steps, in the order in which they were handed out: as much as it knew then.

        Those that are still open it hears of when they are handed out, those that were given up it never does.
        """
        records = [record for record in self.parts.folder.records() if record["kind"] == "step"]
        groups: dict[str, list[Rollout]] = {}
        for rollout in self.parts.store.rollouts(split="train") if records else ():
            groups.setdefault(rollout.group_id, []).append(rollout)
        names = [group_name(self.config, index) for record in records for index in record.get("handed_out", ())]
        for name in filter(groups.__contains__, names):  # a store may have been pruned
            # Where our own scoring had failed, somebody else may have scored it.
            refresh = self._collector.refresh
            self._sampler.observe([r if r.state is RolloutState.SUCCEEDED else refresh(r) for r in groups[name]])

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
            beside = self.config.train.schedule == "disaggregated"  # then agents run all the time
            seconds = record["times"]["total" if beside else "rollouts"]
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
    group_id = group_name(config, index)
    return [
        Rollout(
            id=f"{group_id}-{member}",
            task=task,
            group_id=group_id,
            split="train",
            step=index // config.train.groups + 1,
            sampling={"temperature": config.train.temperature, **PLAIN_SAMPLING},
        )
        for member in range(config.train.group_size)
    ]


def group_name(config: RunConfig, index: int) -> str:
    step, place = index // config.train.groups + 1, index % config.train.groups
    return f"step-{step:04d}-{place:03d}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counter.most_common()) or "no reason counted"
