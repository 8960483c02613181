"""The seams. Each plug-in is one small class that satisfies one of these, chosen by short name or ``module:attr``.

Protocols are synchronous and thread-safe unless a method says otherwise, so that a service can call them from its
event loop through a future and a trainer can call them straight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.types import (
    Attempt,
    Call,
    Episode,
    FloatArray,
    Json,
    Reward,
    Rollout,
    RolloutState,
    Row,
    Sample,
    Score,
    Session,
    Task,
)


class Store(Protocol):
    """Where calls, rewards, sessions and rollouts live. Sequence numbers grow in commit order; none arrives late."""

    @property
    def remote(self) -> bool:
        """A read waits for another process, so an event loop must not make it itself."""

    @property
    def pending(self) -> int:
        """Writes that were taken and are not durable yet."""

    def append_call(self, call: Call) -> Future[int]:
        """Queue `call`; the future gives its sequence number once it is durable.

        Raises `StoreBusy` at once when the queue is full; the future raises `StoreError` when the commit fails.
        """

    def calls(self, attempt_id: str, after: int = 0) -> list[Call]:
        """The calls of one attempt with a sequence number above `after`, in order of commit."""

    def call(self, call_id: str) -> Call | None: ...

    def calls_after(self, seq: int, limit: int = 1000) -> list[Call]:
        """Calls with a sequence number above `seq`, in order: what a follower has not seen yet."""

    def add_reward(self, reward: Reward) -> Future[int]:
        """Append a reward. Never overwrites; readers take the newest of each name."""

    def rewards(self, attempt_id: str) -> list[Reward]: ...

    def open_session(self, session: Session) -> None: ...

    def session(self, key_hash: str) -> Session | None: ...

    def sessions(self, attempt_id: str) -> list[Session]:
        """Those of one attempt, in no order."""

    def seal(self, attempt_id: str) -> None:
        """Refuse further calls on the attempt's key. Sealing twice is harmless."""

    def add_rollouts(self, rollouts: Sequence[Rollout]) -> int:
        """Insert those whose id is new; returns how many were. Existing ones are left as they are (re-adoption)."""

    def rollout(self, rollout_id: str) -> Rollout | None: ...

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, state: RolloutState | None = None
    ) -> list[Rollout]: ...

    def transition(self, rollout: Rollout, *, expect: tuple[RolloutState, int]) -> bool:
        """Write `rollout` if the stored state and attempt number equal `expect` (compare and set); else False."""

    def put_attempt(self, attempt: Attempt) -> None:
        """Insert or replace by id."""

    def attempt(self, attempt_id: str) -> Attempt | None: ...

    def attempts(self, rollout_id: str) -> list[Attempt]: ...

    def set_value(self, key: str, value: str) -> None:
        """Small durable facts, such as ``policy_version``."""

    def value(self, key: str) -> str | None: ...

    def values(self, prefix: str) -> dict[str, str]:
        """Those whose key begins with `prefix`."""

    def close(self) -> None:
        """Commit what is queued and release the files."""


class Engine(Protocol):
    """The model server's control side. The data side is HTTP at `base_url`, which the gateway forwards to."""

    @property
    def base_url(self) -> str:
        """Without ``/v1``."""

    def wait_ready(self, timeout_s: float) -> None:
        """Return when requests are served. Raises `SetupError` with the engine's last log lines."""

    def load_weights(self, path: Path, version: int) -> None:
        """Serve the weights in `path` (Hugging Face layout) as policy `version`; drops the prefix cache.

        Returns when new requests use them. Raises `EngineError`, after which the old weights still serve.
        """

    def version(self) -> int:
        """The policy version that is served now."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class GatewayControl(Protocol):
    """The gateway's control side, as the trainer uses it around a publish."""

    def pause(self, timeout_s: float) -> int:
        """Admit no new call and wait until those in flight have ended; returns how many have not."""

    def resume(self, version: int) -> None:
        """Admit calls again, recorded under policy `version`, which outlives a restart of the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything an executor needs to start one attempt."""

    attempt_id: str
    task: Task
    env: Mapping[str, str]
    """Added to the executor's own environment: base URLs and the attempt key."""
    workdir: Path
    """Exists, is empty and belongs to this attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an attempt's process ended."""

    attempt_id: str
    exit_code: int | None
    signal: int | None
    timed_out: bool = False
    lost: bool = False
    """The executor itself failed to start it or lost it: an infrastructure failure."""
    not_found: bool = False
    """The harness does not exist; another attempt would not help."""
    cancelled: bool = False
    reason: str = ""
    stdout_tail: str = ""
    stderr_tail: str = ""
    duration_s: float = 0.0
    cpu_s: float | None = None


class Executor(Protocol):
    """Runs attempts."""

    def start(self, launch: Launch) -> None:
        """Start and return at once. A start that fails is reported by `poll`, not raised."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """Attempts that ended since the last poll; waits up to `timeout_s` for the first one."""

    def stop(self, attempt_id: str) -> None:
        """Kill the attempt's whole process group; its exit is still reported by `poll`."""

    def hold_time(self, held: bool) -> None:
        """Let time limits stand still, or go on. Held while nobody is answered: that time is ours, not the agents'.

        Called by another thread than those that start and poll.
        """

    def close(self) -> None:
        """Kill everything that still runs."""


class RewardFunction(Protocol):
    """Scores a finished attempt. May be slow; raises when it cannot tell, and never returns 0 for that."""

    def __call__(self, episode: Episode) -> Score | float: ...


class Sampler(Protocol):
    """Chooses the task of each group. Built with ``(tasks, seed=..., success=...)``."""

    def choose(self, index: int) -> int:
        """Position in the list of tasks for group number `index`."""

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """The rollouts of one group have ended. Told of those of earlier lives of the run too, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Which loss, with its numbers; `outrider.rl.losses.LOSSES` has the names."""

    name: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    """Of `ppo_clip`: for negative advantages the ratio counts up to this, above 1; 0 for no such bound."""
    tau_positive: float = 1.0
    """Of `sapo`: how fast its gate closes where the advantage is positive; `tau_negative` where it is not."""
    tau_negative: float = 1.05
    divergence: float = 0.15
    """Of the `dppo` losses: divergence from the behaviour policy beyond which a token gets no further push away."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the loss of a token has ``- entropy_coef * entropy``."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the loss; `kl` names its estimator: k1, k2 or k3."""
    kl: str = "k3"
    value_coef: float = 0.5
    """Weight of the critic's loss, where rows have `returns`."""
    value_clip: float = 0.2
    """How far a value may move from `Row.old_values` before the critic's loss stops it; 0 for no such bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one `forward_backward` saw. Means are over trained tokens, weighted alike."""

    loss: float
    tokens: int
    """Trained tokens."""
    tokens_computed: int
    """Positions that went through the model; fewer than the sum of row lengths when prefixes are shared."""
    ratio_mean: float
    clip_fraction: float
    entropy: float
    kl_behaviour: float
    """k3 estimate of KL(behaviour || current), nats a token."""
    kl_reference: float
    logprob_diff_mean: float
    """Mean absolute difference, engine against trainer. Before the first update of a step it is pure mismatch."""
    logprob_diff_max: float
    tokens_recomputed: int = 0
    """Part of `tokens_computed`: prefixes computed again because the token budget cut the tree above them."""
    value_loss: float | None = None
    """Of the critic, before `LossSpec.value_coef`; None where no row has `returns`."""
    value_explained_variance: float | None = None
    """``1 - var(returns - values) / var(returns)``: 1 is a perfect critic, 0 one that knows the mean at best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStats:
    grad_norm: float
    """Of the policy's weights, before clipping; a value head is clipped on its own."""
    lr: float
    skipped: bool = False
    """True where the gradient was not finite: weights are unchanged."""


class Backend(Protocol):
    """Holds the weights. The shape of Tinker's training API."""

    def forward_backward(self, rows: Sequence[Row], loss: LossSpec) -> StepStats:
        """Accumulate the gradient of ``sum(weights * loss)`` over `rows`. Splits into micro-batches by token budget."""

    def optim_step(self, lr: float) -> OptimStats:
        """Clip, step, zero the gradient."""

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[FloatArray]:
        """Log-probs of trained tokens at the sample's temperature, (T,) each; 0 where the mask is false."""

    def values(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """The critic's value of the state before each trained token, (T,) each; 0 where the mask is false.

        Raises `ConfigError` where the backend has no critic.
        """

    def publish(self, directory: Path) -> Path:
        """Write the present weights in Hugging Face layout to `directory`, atomically; returns it."""

    def save(self, directory: Path) -> None:
        """Write weights, optimiser and random state for an exact resume, atomically."""

    def load(self, directory: Path) -> None: ...


class Observer(Protocol):
    """Somebody who watches a run: the terminal view, a test, nobody. Called from the training thread."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins: ``evaluate before``, ``step 3: rollouts``, …; `total` counts its units, 0 if unknown."""

    def advance(self, rollout: Rollout | None = None) -> None:
        """One unit of the phase is done; `rollout` where the unit is one."""

    def record(self, record: Json, *, earlier: bool = False) -> None:
        """A line of ``metrics.jsonl``. `earlier`: an earlier start of this run wrote it."""

    def message(self, text: str) -> None:
        """One sentence for a person: a retry, a skipped step, a restart of a service."""
