"""The nouns of Outrider. Every other module speaks in these; this one imports none of them.

Records are frozen dataclasses: a changed record is a new record (`dataclasses.replace`). Arrays are numpy and
one-dimensional unless a docstring says otherwise; a token sequence is ``int32``, log-probs are ``float32``.
Times are seconds: `*_at` is wall clock since the epoch, `*_s` is a duration measured on a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Json = dict[str, Any]
Runs = tuple[tuple[int, int], ...]
"""Policy versions of tokens that follow each other: ``(version, number of tokens)``, in order."""


class Mode(StrEnum):
    """What the gateway keeps of a call."""

    PASSTHROUGH = "passthrough"  # nothing
    RECORD = "record"  # requests and responses, sampled by whole trajectory
    TRAIN = "train"  # also token ids and log-probs
    EVAL = "eval"  # as train; never trained on


class Fidelity(StrEnum):
    """How far a recorded call can be trusted token by token. Only `EXACT` is trained on by policy gradient."""

    EXACT = "exact"  # ids and log-probs as the engine sampled them, counts agreeing with `usage`
    TEXT = "text"  # the upstream gave no ids
    BROKEN = "broken"  # ids were given and don't add up; `Call.fidelity_reason` says how


class CallState(StrEnum):
    COMPLETE = "complete"
    FAILED = "failed"  # upstream answered with an error, cut the stream, or could not be reached
    CANCELLED = "cancelled"  # the client left before the end
    INTERRUPTED = "interrupted"  # the gateway was stopped by force in the middle; one that is killed leaves no record


class Break(StrEnum):
    """Why a prompt does not continue the tokens of an earlier answer, though the agent goes on with the talk."""

    SYSTEM_CHANGED = "system prompt changed"
    TOOLS_CHANGED = "tools changed"
    OPTIONS_CHANGED = "template options changed"
    HISTORY_REWRITTEN = "history rewritten"
    CALL_REWRITTEN = "tool call rewritten by the harness"
    REASONING_DROPPED_BY_HARNESS = "reasoning dropped by the harness"
    REASONING_DROPPED_BY_TEMPLATE = "reasoning dropped by template"
    UNKNOWN = "unknown"  # the template gives no proof of how it goes on


class RolloutState(StrEnum):
    """`queued → running → succeeded / failed / cancelled`. A rollout that is tried again goes back to queued."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"  # it has a reward, be it 0
    FAILED = "failed"  # it has none, and no further attempt is made
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (RolloutState.SUCCEEDED, RolloutState.FAILED, RolloutState.CANCELLED)


class Failure(StrEnum):
    """Why an attempt did not end well. `infrastructure` ones give no reward (DESIGN.md, invariant 6)."""

    NONE = "none"
    HARNESS_EXIT = "harness_exit"  # non-zero exit status, or killed by a signal that we did not send
    HARNESS_TIMEOUT = "harness_timeout"  # over its time limit; graded on what it had done
    HARNESS_NOT_FOUND = "harness_not_found"  # the command or function does not exist
    NO_CALLS = "no_calls"  # the harness ended well without calling the model once
    ENGINE = "engine"  # the last call of the attempt failed upstream
    GATEWAY = "gateway"  # our own gateway failed or refused a call it should have taken
    EXECUTOR = "executor"  # the process could not be started or was lost
    REWARD_ERROR = "reward_error"  # the reward raised
    REWARD_INVALID = "reward_invalid"  # the reward returned NaN, an infinity or no number
    ORPHANED = "orphaned"  # the trainer died while it ran
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True where the policy is not to blame, so the attempt says nothing about it."""
        return self not in (Failure.NONE, Failure.HARNESS_EXIT, Failure.HARNESS_TIMEOUT)

    @property
    def retried(self) -> bool:
        """True where a further attempt may end better."""
        return self.infrastructure and self not in (Failure.HARNESS_NOT_FOUND, Failure.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One input for the harness: a row of a dataset. `fields` are the row's own keys."""

    id: str
    fields: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the harness on one task. `id` is chosen by the caller, so that asking twice is harmless."""

    id: str
    task: Task
    group_id: str
    """Rollouts with the same group id are compared with each other."""
    split: str = "train"
    """What it is for: ``train``, or the name of an evaluation."""
    step: int = 0
    """The training step that asked for it."""
    mode: Mode = Mode.TRAIN
    sampling: Json = field(default_factory=dict)
    """Sampling parameters the gateway puts over those of the harness, e.g. ``{"temperature": 1.0}``."""
    state: RolloutState = RolloutState.QUEUED
    attempt: int = 0
    """Number of the current attempt, from 1; 0 before the first."""
    reward: float | None = None
    failure: Failure = Failure.NONE
    reason: str = ""
    """One sentence on `failure`, or the reward's own reason."""

    @property
    def attempt_id(self) -> str:
        """Id of the current attempt; of none before the first."""
        return f"{self.id}.a{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at a rollout, and the process that ran it."""

    id: str
    rollout_id: str
    number: int
    started_at: float = 0.0
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    failure: Failure = Failure.NONE
    reason: str = ""
    stdout_tail: str = ""
    stderr_tail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What an attempt key opens. The key itself is never stored, only its SHA-256."""

    attempt_id: str
    key_hash: str
    mode: Mode
    sampling: Json = field(default_factory=dict)
    allow_feedback: bool = False
    expires_at: float | None = None
    sealed: bool = False
    """Set when the attempt ends: later calls are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled answer of a call (``n`` of them). ``len(token_ids) == len(logprobs)`` when the call is exact."""

    index: int
    token_ids: IntArray
    logprobs: FloatArray
    """Log-prob of each token under the distribution it was sampled from (see `Call.sampling`)."""
    finish_reason: str | None = None
    """As the engine said it. ``length`` means truncated, whatever the last token is."""
    versions: Runs = ()
    """Which versions sampled its tokens. Empty where all are of one and the call says which
    (``version_start == version_end``), and where nobody knows: then the older of the call's two counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A sending of a call that gave no answer to the agent and was followed by another one."""

    replica: str
    status: int
    """The upstream's; 0 where no answer came."""
    error: str
    duration_s: float
    wait_s: float
    """Between its end and the next sending."""


UPSTREAM_STATUS = "the upstream answered with status "
"""How `Call.error` begins, before the number, where the upstream answered with an error. The agent's status may be
another: a protocol may tell of it inside a stream with status 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request–response pair at the service boundary."""

    id: str
    attempt_id: str
    """The attempt whose key was used, or the production trajectory the call was grouped into."""
    dialect: str
    model: str
    state: CallState
    status: int
    """HTTP status that the agent got."""
    streamed: bool
    request: bytes
    """Body as the agent sent it."""
    response: bytes
    """Body as the upstream sent it: JSON, or the raw event stream. Where the gateway made the prompt (`continuation`),
    the chat answer that it made of the sampled ids."""
    prompt_ids: IntArray | None
    choices: tuple[Choice, ...]
    usage: Usage | None
    fidelity: Fidelity
    fidelity_reason: str = ""
    sampling: Json = field(default_factory=dict)
    """Sampling parameters that were in force, after overrides."""
    version_start: int | None = None
    """Policy version when the call was forwarded; None where the upstream's weights are not ours."""
    version_end: int | None = None
    """Policy version when its last token came. Where it differs from `version_start`, weights were swapped within the
    call: see `Choice.versions`."""
    started_at: float = 0.0
    duration_s: float = 0.0
    first_token_s: float | None = None
    error: str = ""
    continuation: str = ""
    """How its prompt came about, where the gateway made it: ``continued``, ``opened`` or ``broke: <Break>``. Where the
    engine did: ``engine: …`` where it had to, or where the agent's text may have become control tokens; else empty.
    Behind ``; `` stand further notes, such as what became of a tool call that the agent had forced."""
    replica: str = ""
    """The replica of the upstream that answered or was tried last, by its URL without what is secret."""
    retries: tuple[Retry, ...] = ()
    """What was tried before, in order. The call holds the answer of the last sending only."""
    seq: int = 0
    """Position in the store, given at the commit; grows with the order of commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score for an attempt, or for one call of it. Several may exist; of each the newest named ``final`` counts."""

    attempt_id: str
    value: float
    name: str = "final"
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Named components, for people to look at."""
    source: str = ""
    """Who gave it: the reward plug-in, ``user``, ``judge``, …"""
    created_at: float = 0.0
    call_id: str = ""
    """The call it is for; empty for the attempt as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What a reward plug-in returns."""

    value: float
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single calls, by call id, for estimators that give credit step by step. `value` is not their sum: it
    is what the rollout as a whole is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a reward plug-in gets to see: the task, what the harness did, and every call it made, in order."""

    task: Task
    attempt: Attempt
    calls: tuple[Call, ...]
    workdir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row cut from a trajectory.

    All five arrays have the same length T. ``loss_mask[t]`` is true where `token_ids[t]` was sampled by the policy and
    is trained here; elsewhere `logprobs` is 0 and `versions` is -1. Each sampled token is true in one sample only.
    """

    rollout_id: str
    group_id: str
    attempt_id: str
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: FloatArray
    """Behaviour log-probs: as the engine sampled."""
    versions: IntArray
    call_index: IntArray
    """For trained tokens the position of their call among the attempt's calls in order of commit, elsewhere -1."""
    truncated: bool = False
    """The last call in it ended with finish_reason ``length``."""
    temperature: float = 1.0
    """Sampling temperature of its trained tokens: the trainer divides logits, never log-probs, by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sample with its credit, ready for a backend.

    The loss of a batch is ``sum over rows and t of weight[t] * loss(t)``, where `weight` already holds the
    normalisation; so the gradient depends neither on the order of rows nor on how they are split into micro-batches.
    """

    sample: Sample
    advantages: FloatArray
    weights: FloatArray
    """0 wherever `sample.loss_mask` is false."""
    reference_logprobs: FloatArray | None = None
    """Log-probs under the reference policy, where a KL term is asked for."""
    old_logprobs: FloatArray | None = None
    """Log-probs under the trainer's weights before the update (the proximal policy). Where given, a loss takes its
    ratio to these; else to `sample.logprobs`, as the engine sampled."""
    returns: FloatArray | None = None
    """What the value head should predict at each trained token, where there is a critic."""
    old_values: FloatArray | None = None
    """What it predicted there before the update, for clipping its step."""
