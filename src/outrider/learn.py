"""From the rows of a step to new weights: credit, reference log-probs, gradient, optimiser."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.config import TrainConfig
from outrider.metrics import Timer
from outrider.protocols import Backend, LossSpec, Observer, OptimStats, StepStats
from outrider.rl.batch import Batch, make_batch
from outrider.types import Rollout, Sample


class Learner:
    """What `config` says a step learns, and how. `check_stop` raises where the run shall end."""

    def __init__(
        self, config: TrainConfig, backend: Backend, observer: Observer, check_stop: Callable[[], None]
    ) -> None:
        self.config = config
        self.backend = backend
        self.observer = observer
        self._check_stop = check_stop

    def batch(self, rollouts: Sequence[Rollout], samples: Sequence[Sample]) -> Batch:
        """Rows with their credit. Raises as `make_batch`."""
        return make_batch(
            samples,
            {rollout.id: rollout.reward for rollout in rollouts},
            {rollout.id: rollout.group_id for rollout in rollouts},
            estimator=self.config.advantage,
            normalisation=self.config.normalisation,
        )

    def update(
        self, step: int, batch: Batch, timer: Timer, before_change: Callable[[], None]
    ) -> tuple[StepStats, OptimStats]:
        """`epochs` passes over the batch; `before_change` is called before each change of the weights.

        The statistics returned are those of the first pass, which is on policy.
        """
        config = self.config
        loss = LossSpec(name=config.loss, clip_low=config.clip_low, clip_high=config.clip_high, kl_coef=config.kl_coef)
        rows = batch.rows
        if config.kl_coef:
            rows = batch.with_reference(self.backend.logprobs([row.sample for row in rows], reference=True))
        passes: list[tuple[StepStats, OptimStats]] = []
        for _ in range(config.epochs):
            self._check_stop()
            stats = self.backend.forward_backward(rows, loss)
            timer.lap("forward_backward")
            before_change()
            timer.skip()
            optim = self.backend.optim_step(learning_rate(config.lr, config.warmup_steps, step))
            if optim.skipped:
                self.observer.message(f"step {step}: the gradient was not finite; weights stay as they are")
            passes.append((stats, optim))
            self.observer.advance()
        timer.lap("forward_backward")
        return passes[0]


def learning_rate(peak: float, warmup_steps: int, step: int) -> float:
    """Linear from peak / (warmup + 1) at step 1 to `peak`, then constant."""
    return peak * min(1.0, step / (warmup_steps + 1))
