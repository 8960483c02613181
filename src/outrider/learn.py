"""From the rows of a step to new weights: credit, reference and proximal log-probs, gradient, optimiser."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from outrider.config import TrainConfig
from outrider.errors import ConfigError, RunError
from outrider.metrics import Timer
from outrider.protocols import Backend, LossSpec, Observer, OptimStats, StepStats
from outrider.rl.advantages import CRITICS, ESTIMATORS, Context, RunningMean, compares_within_groups, unit_of
from outrider.rl.batch import Batch, make_batch
from outrider.rl.correction import Bounds, Correction, check_methods, correct
from outrider.rl.credit import Evidence
from outrider.rl.mismatch import HISTORY, alarm
from outrider.rl.steps import find_state
from outrider.types import FloatArray, Json, Rollout, Row, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the update of a step did. The statistics are those of its first pass, before the weights moved."""

    stats: StepStats
    optim: OptimStats
    correction: Correction | None
    """Where `train.correction` names any."""

    @property
    def excluded(self) -> Counter[str]:
        return Counter() if self.correction is None else self.correction.excluded

    def record(self) -> Json:
        """What metrics.jsonl keeps of the correction."""
        return {} if self.correction is None else {"mismatch": asdict(self.correction.mismatch)}


class Learner:
    """What `config` says a step learns, and how. `check_stop` raises where the run shall end.

    Two things outlive a step, so that the record of each step holds them and `recall` reads them back: the running
    baseline, and how far engine and trainer were apart.
    """

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        observer: Observer,
        check_stop: Callable[[], None],
        success: float = 1.0,
    ) -> None:
        self.config = config
        self.backend = backend
        self.observer = observer
        self.success = success
        self.baseline = RunningMean()
        self._differences: list[float] = []
        self._check_stop = check_stop

    def recall(self, record: Json) -> None:
        """Take up what the record of an earlier step says."""
        if "reward_baseline" in record:
            self.baseline = RunningMean(*record["reward_baseline"])
        if record.get("logprob_diff_mean") is not None:
            self._remember(record["logprob_diff_mean"])

    def batch(
        self,
        rollouts: Sequence[Rollout],
        samples: Sequence[Sample],
        call_rewards: Mapping[str, FloatArray] | None = None,
    ) -> Batch:
        """Rows with their credit. `call_rewards` has one number a call, by rollout id. Raises as `make_batch`."""
        config = self.config
        evidence = Evidence(
            call_rewards=call_rewards or {},
            values=self.backend.values(samples) if config.advantage in CRITICS else None,
            state=find_state(config.gigpo_state),
        )
        if config.kl_coef and config.kl_in == "reward":
            evidence = self._with_penalties(evidence, samples)
        batch = self._credited(rollouts, samples, evidence)
        self.baseline = self.baseline.after(batch.earned, config.running_decay)
        return batch

    def has_signal(
        self, rollouts: Sequence[Rollout], samples: Sequence[Sample], call_rewards: Mapping[str, FloatArray]
    ) -> bool:
        """Whether the estimator finds something to learn in a group, from its rewards alone."""
        evidence = Evidence(call_rewards=call_rewards, state=find_state(self.config.gigpo_state))
        return self._credited(rollouts, samples, evidence).groups_trained > 0

    def record(self) -> Json:
        """What the record of a step must hold for `recall`, beside `logprob_diff_mean`."""
        if self.config.advantage in ESTIMATORS and self.config.advantage != "reinforce_running":
            return {}  # one of somebody else's may read it
        return {"reward_baseline": [self.baseline.total, self.baseline.weight]}

    def update(self, step: int, batch: Batch, timer: Timer, before_change: Callable[[], None]) -> Update:
        """`epochs` passes over the batch; `before_change` is called before each change of the weights.

        Raises `RunError`, with the weights as they were, where engine and trainer disagree by more than
        `stop_on_mismatch` allows.
        """
        config = self.config
        loss = loss_spec(config)
        rows = batch.rows
        correction = None
        if config.correction:
            correction = correct(self._with_old(rows), config.correction, bounds(config))
            rows = correction.rows
        if loss.kl_coef:
            reference = self.backend.logprobs([row.sample for row in rows], reference=True)
            rows = tuple(replace(row, reference_logprobs=given) for row, given in zip(rows, reference, strict=True))
        passes: list[tuple[StepStats, OptimStats]] = []
        for _ in range(config.epochs):
            self._check_stop()
            stats = self.backend.forward_backward(rows, loss)
            if not passes:
                self._check_mismatch(step, stats.logprob_diff_mean)
            timer.lap("forward_backward")
            before_change()
            timer.skip()
            optim = self.backend.optim_step(learning_rate(config.lr, config.warmup_steps, step))
            if optim.skipped:
                self.observer.message(f"step {step}: the gradient was not finite; weights stay as they are")
            passes.append((stats, optim))
            self.observer.advance()
        timer.lap("forward_backward")
        return Update(stats=passes[0][0], optim=passes[0][1], correction=correction)

    def _credited(self, rollouts: Sequence[Rollout], samples: Sequence[Sample], evidence: Evidence) -> Batch:
        config = self.config
        return make_batch(
            samples,
            {rollout.id: rollout.reward for rollout in rollouts},
            {rollout.id: rollout.group_id for rollout in rollouts},
            estimator=config.advantage,
            normalisation=config.normalisation,
            context=Context(
                running=self.baseline.mean,
                success=self.success,
                k=config.pass_k,
                gamma=config.gamma,
                lam=config.gae_lambda,
                step_weight=config.gigpo_weight,
            ),
            evidence=evidence,
            constant_tokens=config.constant_tokens,
        )

    def _with_old(self, rows: Sequence[Row]) -> list[Row]:
        old = self.backend.logprobs([row.sample for row in rows])
        return [replace(row, old_logprobs=given) for row, given in zip(rows, old, strict=True)]

    def _with_penalties(self, evidence: Evidence, samples: Sequence[Sample]) -> Evidence:
        from outrider.rl.kl_reward import kl_penalties  # torch, which a trainer's process has by now

        old, reference = self.backend.logprobs(samples), self.backend.logprobs(samples, reference=True)
        penalties = kl_penalties(samples, old, reference, self.config.kl_coef, self.config.kl)
        return replace(evidence, penalties=penalties, reference_logprobs=reference)

    def _check_mismatch(self, step: int, difference: float) -> None:
        config = self.config
        why = alarm(self._differences, difference, limit=config.stop_on_mismatch, jump=config.stop_on_mismatch_jump)
        if why:
            raise RunError(
                f"step {step}: {why}. The weights are those before this step. Look for a publish that failed, a "
                "sampling parameter that the trainer does not know of, or another tokenizer or chat template."
            )
        self._remember(difference)

    def _remember(self, difference: float) -> None:
        if math.isfinite(difference):
            self._differences = [*self._differences, difference][-HISTORY:]


def check(config: TrainConfig) -> None:
    """Raise `ConfigError` for a name that stands for nothing, and for what does not go together."""
    from outrider.rl.losses import find_loss  # torch, which an evaluation does not need

    unit_of(config.advantage)
    find_loss(config.loss)
    find_state(config.gigpo_state)
    check_methods(config.correction)
    bounds(config)
    _check_together(config)


def _check_together(config: TrainConfig) -> None:
    if config.advantage == "pass_at_k" and config.pass_k >= config.group_size:
        raise ConfigError(
            f"train.pass_k: of {config.group_size} rollouts each set of {config.pass_k} is the whole group, which "
            "tells none of them apart; pass_k must be below group_size."
        )
    if config.kl_coef and config.kl_in == "loss" and config.kl == "k1":
        raise ConfigError(
            "train.kl: as a term of the loss k1 has a gradient of 0 in expectation, so it would hold nothing back; "
            'take k2 or k3, or take it off the reward (train.kl_in = "reward").'
        )
    if config.advantage == "pass_at_k" and config.kl_coef and config.kl_in == "reward":
        raise ConfigError(
            "train.kl_in: pass_at_k asks whether a rollout is solved, which a KL taken off its reward would decide; "
            "take the KL into the loss."
        )
    if config.dynamic_filter and not compares_within_groups(config.advantage):
        raise ConfigError(
            f"train.dynamic_filter: {config.advantage} learns from groups whose rewards are equal too, so none may be "
            "replaced; turn it off, or take an estimator that compares within a group, such as grpo."
        )
    if config.dynamic_filter and config.kl_coef and config.kl_in == "reward":
        raise ConfigError(
            "train.dynamic_filter: with a KL off the reward no two rewards are equal, so every group has signal and "
            "none would ever be replaced; take the KL into the loss (train.kl_in), or turn the filter off."
        )


def loss_spec(config: TrainConfig) -> LossSpec:
    return LossSpec(
        name=config.loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        tau_positive=config.sapo_tau_positive,
        tau_negative=config.sapo_tau_negative,
        divergence=config.dppo_divergence,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
        kl=config.kl,
        value_coef=config.value_coef,
        value_clip=config.value_clip,
    )


def bounds(config: TrainConfig) -> Bounds:
    return Bounds(
        tis_cap=config.tis_cap,
        icepop_low=config.icepop_low,
        icepop_high=config.icepop_high,
        geometric_low=config.geometric_low,
        geometric_high=config.geometric_high,
        dppo_divergence=config.dppo_divergence,
    )


def learning_rate(peak: float, warmup_steps: int, step: int) -> float:
    """Linear from peak / (warmup + 1) at step 1 to `peak`, then constant."""
    return peak * min(1.0, step / (warmup_steps + 1))
