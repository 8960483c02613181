"""The training loop, read from top to bottom: roll out, join, credit, update, publish.

One step is synchronous: all rollouts of step k are sampled by the policy that step k-1 published. Its checkpoint is
written in the background while the rollouts of step k+1 run, since nothing touches the weights meanwhile; a step is
finished when that checkpoint is complete. After a crash the trainer goes on from the last finished step. The rollouts
that had ended by then lie in the store and are taken as they are, so none is paid for or counted twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider import evaluate, trajectory
from outrider.config import RunConfig
from outrider.errors import EngineError, Interrupted, RunError
from outrider.memory import MemoryWatch
from outrider.protocols import Backend, Engine, GatewayControl, LossSpec, Observer, OptimStats, StepStats, Store
from outrider.reconcile import Reconciler
from outrider.rl.batch import Batch, make_batch
from outrider.runfolder import RunFolder
from outrider.types import Json, Rollout, RolloutState, Sample, Task

PUBLISH_TRIES = 3


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


class Timer:
    """Splits a step into named parts; what no part claims is `rest`."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._parts: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def skip(self) -> None:
        """Leave what passed since the last lap to `rest`."""
        self._last = time.monotonic()

    def times(self) -> dict[str, float]:
        total = time.monotonic() - self._began
        return {"total": total, **self._parts, "rest": total - sum(self._parts.values())}


class Trainer:
    """Trains `config.train.steps` steps with an evaluation before and after."""

    def __init__(
        self, config: RunConfig, parts: Parts, tasks: Sequence[Task], held_out: Sequence[Task], progress: Progress
    ) -> None:
        self.config = config
        self.parts = parts
        self.tasks = list(tasks)
        self.held_out = list(held_out)
        self.progress = progress
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._wall_base = max((record["wall_s"] for record in parts.folder.records()), default=0.0)
        self._began = time.monotonic()

    def run(self) -> Json:
        """Train to the end. Returns ``{"before", "after", "wall_s"}``. Raises `RunError` and `Interrupted`."""
        try:
            self._restore()
            before = self._evaluate("before")
            while self.progress.step < self.config.train.steps:
                self._step(self.progress.step + 1)
                every = self.config.eval.every
                if every and self.progress.step % every == 0 and self.progress.step < self.config.train.steps:
                    self._evaluate(f"step-{self.progress.step}")
            self._await_checkpoint()
            after = self._evaluate("after")
        finally:
            self._saver.shutdown(wait=True)  # a checkpoint that was begun is worth a few seconds
        return {"before": before, "after": after, "wall_s": self._wall()}

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        timer = Timer()
        self._phase(f"step {step}: rollouts", self.config.train.groups * self.config.train.group_size)
        rollouts = self.parts.reconciler.run(plan_step(self.config, self.tasks, step))
        timer.lap("rollouts")
        samples, excluded = self._samples(rollouts)
        batch = make_batch(
            samples,
            {rollout.id: rollout.reward for rollout in rollouts},
            {rollout.id: rollout.group_id for rollout in rollouts},
            estimator=self.config.train.advantage,
            normalisation=self.config.train.normalisation,
        )
        excluded.update(batch.excluded)
        timer.lap("samples")
        record = self._rollout_record(step, rollouts, samples, batch)
        if batch.rows:
            stats, optim = self._update(step, batch, timer)
            timer.lap("forward_backward")
            self._publish()
            timer.lap("publish")
            record |= _update_record(stats, optim)
        else:
            record |= {"skipped": True, "tokens": 0, "tokens_computed": 0}
            self._say(f"step {step} has nothing to learn from ({_counts(excluded)}); weights stay as they are")
        self.progress.step = step
        record["policy_version"] = self.progress.policy_version
        record["excluded"] = dict(excluded)
        record["failures"] = self.parts.reconciler.take_failures()
        self._await_checkpoint()
        self._record(record | {"times": timer.times()})
        self._saving = self._saver.submit(self._checkpoint, step, self.progress.policy_version)

    def _samples(self, rollouts: Sequence[Rollout]) -> tuple[list[Sample], Counter[str]]:
        """Cut the training rows of every scored rollout from its calls."""
        samples: list[Sample] = []
        excluded: Counter[str] = Counter()
        for rollout in rollouts:
            if rollout.state is not RolloutState.SUCCEEDED:
                excluded[f"rollout {rollout.state}: {rollout.failure}"] += 1
                continue
            tree = trajectory.build(self.parts.store.calls(f"{rollout.id}.a{rollout.attempt}"))
            cut = tree.samples(
                rollout_id=rollout.id, group_id=rollout.group_id, max_tokens=self.config.train.max_tokens
            )
            samples += cut.samples
            excluded.update(cut.excluded)
        return samples, excluded

    def _update(self, step: int, batch: Batch, timer: Timer) -> tuple[StepStats, OptimStats]:
        """`train.epochs` passes over the batch. The statistics returned are those of the first, which is on policy."""
        config = self.config.train
        self._phase(f"step {step}: update", config.epochs)
        loss = LossSpec(name=config.loss, clip_low=config.clip_low, clip_high=config.clip_high, kl_coef=config.kl_coef)
        rows = batch.rows
        if config.kl_coef:
            reference = self.parts.backend.logprobs([row.sample for row in rows], reference=True)
            rows = batch.with_reference(reference)
        first: tuple[StepStats, OptimStats] | None = None
        for _ in range(config.epochs):
            self._check_stop()
            stats = self.parts.backend.forward_backward(rows, loss)
            timer.lap("forward_backward")
            self._await_checkpoint()  # the last step's weights must be on disk before they change
            timer.skip()
            optim = self.parts.backend.optim_step(learning_rate(config.lr, config.warmup_steps, step))
            if optim.skipped:
                self._say(f"step {step}: the gradient was not finite; weights stay as they are")
            first = first or (stats, optim)
            self.parts.observer.advance()
        assert first is not None
        return first

    def _publish(self) -> None:
        """Give the engine the present weights. The version counts only once the engine serves them."""
        version = self.progress.policy_version + 1
        weights = self.parts.backend.publish(self.parts.folder.weights_dir(version))
        for attempt in range(1, PUBLISH_TRIES + 1):
            self.parts.services_up()
            try:
                self.parts.gateway.pause(timeout_s=30.0)
                self.parts.engine.load_weights(weights, version)
                break
            except EngineError as error:
                self._say(f"publish of version {version} failed ({error}), attempt {attempt} of {PUBLISH_TRIES}")
                if attempt == PUBLISH_TRIES:
                    raise RunError(f"cannot publish version {version}: {error}") from error
        self.progress.policy_version = version  # first, so that an engine restarted from here on loads these
        self.parts.gateway.resume(version)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def _evaluate(self, name: str) -> Json:
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
            reconciler=self.parts.reconciler,
            observer=self.parts.observer,
        )
        self._record(record)
        return record

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        folder = self.parts.folder
        checkpoint = folder.latest()
        if checkpoint is None:
            folder.forget_after(0)
        else:
            self.parts.backend.load(checkpoint.path)
            self.progress.step, self.progress.policy_version = checkpoint.step, checkpoint.policy_version
            folder.forget_after(checkpoint.step)
            self._say(f"going on after step {checkpoint.step}, policy version {checkpoint.policy_version}")
        self.parts.gateway.resume(self.progress.policy_version)
        for record in folder.records():
            if record["kind"] == "step":
                self.parts.observer.record(record)

    def _checkpoint(self, step: int, version: int) -> None:
        folder = self.parts.folder
        self.parts.backend.save(folder.checkpoint_dir(step))
        folder.finish_step(step, version, folder.weights_dir(version))
        folder.prune(self.config.train.keep_checkpoints)

    def _await_checkpoint(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    # -- telling ---------------------------------------------------------------------------------------------------

    def _rollout_record(self, step: int, rollouts: Sequence[Rollout], samples: Sequence[Sample], batch: Batch) -> Json:
        rewards = np.array([r.reward for r in rollouts if r.reward is not None], dtype=np.float64)
        return {
            "kind": "step",
            "step": step,
            "reward_mean": float(rewards.mean()) if rewards.size else 0.0,
            "reward_std": float(rewards.std()) if rewards.size else 0.0,
            "success": float((rewards >= self.config.reward.success).mean()) if rewards.size else 0.0,
            "rollouts": len(rollouts),
            "groups": batch.groups,
            "groups_trained": batch.groups_trained,
            "samples": len(samples),
            "sampled_tokens": int(sum(int(sample.loss_mask.sum()) for sample in samples)),
        }

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


def plan_step(config: RunConfig, tasks: Sequence[Task], step: int) -> list[Rollout]:
    """The rollouts of a step: tasks in a shuffled order without replacement, a new order each epoch.

    A function of the seed and the step alone, so that a resumed run asks for the same ones.
    """
    count = config.train.groups
    first = (step - 1) * count
    chosen = [
        _shuffled(len(tasks), config.seed, index // len(tasks))[index % len(tasks)]
        for index in range(first, first + count)
    ]
    return [
        Rollout(
            id=f"step-{step:04d}-{position:03d}-{member}",
            task=tasks[index],
            group_id=f"step-{step:04d}-{position:03d}",
            split="train",
            step=step,
            sampling={"temperature": config.train.temperature},
        )
        for position, index in enumerate(chosen)
        for member in range(config.train.group_size)
    ]


def _shuffled(n: int, seed: int, epoch: int) -> list[int]:
    return [int(index) for index in np.random.default_rng((seed, epoch)).permutation(n)]


def learning_rate(peak: float, warmup_steps: int, step: int) -> float:
    """Linear from peak / (warmup + 1) at step 1 to `peak`, then constant."""
    return peak * min(1.0, step / (warmup_steps + 1))


def _update_record(stats: StepStats, optim: OptimStats) -> dict[str, Any]:
    return {
        "loss": stats.loss,
        "tokens": stats.tokens,
        "tokens_computed": stats.tokens_computed,
        "ratio_mean": stats.ratio_mean,
        "clip_fraction": stats.clip_fraction,
        "entropy": stats.entropy,
        "kl_behaviour": stats.kl_behaviour,
        "kl_reference": stats.kl_reference,
        "logprob_diff_mean": stats.logprob_diff_mean,
        "logprob_diff_max": stats.logprob_diff_max,
        "grad_norm": optim.grad_norm,
        "lr": optim.lr,
        "update_skipped": optim.skipped,
    }


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in counter.most_common()) or "no reason counted"
