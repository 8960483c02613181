"""Off-policy correction: what to do where tokens were not sampled from the weights that are trained.

Engine and trainer disagree on log-probs: by other kernels and types even when they hold the same weights (Yao et al.
2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training), and by age where rollouts run beside the
trainer. With p the probability of a trained token under the trainer's weights before the update, q that under the
engine's, and ``w = p / q``:

    token_tis      min(w, tis_cap)                      token-level truncated importance sampling, the same source
    sequence_tis   min(product of w, tis_cap)           the whole rollout's ratio: unbiased until cut, noisy when long
    icepop         w where icepop_low <= w <= icepop_high, else 0         Ling Team 2025, IcePop, arXiv:2510.18855
    geometric      1 where geometric_low <= exp(mean log w) <= geometric_high over the rollout, else 0
                                                        Liu, Li et al. 2025, When Speed Kills Stability
    dppo_tv        1, but 0 where |p - q| > dppo_divergence and the advantage pushes p further away from q
    dppo_kl        the same with q log(q / p) + (1 - q) log((1 - q) / (1 - p))       Qi et al. 2026, arXiv:2602.04879

A sequence is a rollout, however many rows it fills. Several may act together (their product), of which one may weigh.
The factor multiplies the advantage, which is the same as multiplying the token's loss (`outrider.rl.losses`); KL and
entropy terms stay. A masked token keeps its place in the normalisation, so masking scales no other token up. The DPPO
masks here go by the weights before the update; the losses of the same name go by those in training, as the paper does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from outrider.errors import BatchError, ConfigError
from outrider.rl.advantages.context import Doubles, Index
from outrider.types import BoolArray, FloatArray, Row

LOG_LIMIT = 20.0
"""log w is held within this, as exp of more says nothing."""
_TINY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Numbers of the corrections; a run has them under `train.*`."""

    tis_cap: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    geometric_low: float = 0.99
    geometric_high: float = 1.01
    dppo_divergence: float = 0.15

    def __post_init__(self) -> None:
        for name in ("icepop", "geometric"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            if low > high:
                raise ConfigError(f"train.{name}_low: {low:g} is above {name}_high, {high:g}; all would be masked.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The trained tokens of all rows, end to end; every array has shape (T,)."""

    old: Doubles
    """log p"""
    behaviour: Doubles
    """log q"""
    advantages: Doubles
    rollout: Index
    """Number of each token's rollout, from 0."""

    @property
    def log_w(self) -> Doubles:
        return self.old - self.behaviour

    @property
    def away(self) -> BoolArray:
        """Where the advantage pushes p further away from q."""
        up: BoolArray = self.advantages > 0
        return np.where(up, self.log_w > 0, self.log_w < 0)


Method = Callable[[Drift, Bounds], Doubles]
"""A factor for each token, (T,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """How far behaviour and old policy are apart, over all trained tokens, before anything is cut or masked."""

    weight_mean: float
    weight_max: float
    kl: float
    """KL(behaviour || old), k3 estimate, nats a token."""
    effective: float
    """Effective sample size over the number of tokens, ``(sum w)**2 / (T sum w**2)``: 1 where all w are equal."""
    masked: float
    """Share of tokens that a mask then took out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    rows: tuple[Row, ...]
    mismatch: Mismatch
    excluded: Counter[str]
    """Tokens masked, by reason."""


def token_tis(drift: Drift, bounds: Bounds) -> Doubles:
    return np.minimum(_exp(drift.log_w), bounds.tis_cap)


def sequence_tis(drift: Drift, bounds: Bounds) -> Doubles:
    total = np.bincount(drift.rollout, weights=drift.log_w).astype(np.float64)
    return np.minimum(_exp(total), bounds.tis_cap)[drift.rollout]


def icepop(drift: Drift, bounds: Bounds) -> Doubles:
    w = _exp(drift.log_w)
    return np.where((w >= bounds.icepop_low) & (w <= bounds.icepop_high), w, 0.0)


def geometric(drift: Drift, bounds: Bounds) -> Doubles:
    total = np.bincount(drift.rollout, weights=drift.log_w).astype(np.float64)
    w = _exp(total / np.maximum(1, np.bincount(drift.rollout)))
    return ((w >= bounds.geometric_low) & (w <= bounds.geometric_high)).astype(np.float64)[drift.rollout]


def dppo_tv(drift: Drift, bounds: Bounds) -> Doubles:
    divergence = np.abs(np.exp(drift.old) - np.exp(drift.behaviour))
    return np.where(drift.away & (divergence > bounds.dppo_divergence), 0.0, 1.0)


def dppo_kl(drift: Drift, bounds: Bounds) -> Doubles:
    p, q = np.exp(drift.old), np.exp(drift.behaviour)
    divergence = -q * drift.log_w + (1 - q) * np.log((1 - q + _TINY) / (1 - p + _TINY))
    return np.where(drift.away & (divergence > bounds.dppo_divergence), 0.0, 1.0)


CORRECTIONS: Mapping[str, Method] = MappingProxyType(
    {
        "token_tis": token_tis,
        "sequence_tis": sequence_tis,
        "icepop": icepop,
        "geometric": geometric,
        "dppo_tv": dppo_tv,
        "dppo_kl": dppo_kl,
    }
)
MASKS = frozenset({"icepop", "geometric", "dppo_tv", "dppo_kl"})
WEIGHTS = frozenset({"token_tis", "sequence_tis", "icepop"})


def check_methods(methods: Sequence[str]) -> None:
    """Raise `ConfigError` on an unknown name, or on two methods that both weigh."""
    for name in methods:
        if name not in CORRECTIONS:
            raise ConfigError(f"train.correction: there is no {name!r}. Known: {', '.join(sorted(CORRECTIONS))}.")
    weighing = [name for name in methods if name in WEIGHTS]
    if len(weighing) > 1:
        raise ConfigError(f"train.correction: {' and '.join(weighing)} both multiply by the ratio; give one of them.")


def correct(rows: Sequence[Row], methods: Sequence[str], bounds: Bounds = Bounds()) -> Correction:
    """Multiply the advantages of `rows`, which have `old_logprobs`, by the product of `methods`.

    Without a method the rows come back as they are, with the statistics. Raises `BatchError` on a row without
    `old_logprobs`, `ConfigError` on names that don't fit.
    """
    check_methods(methods)
    drift = _drift(rows)
    factor, excluded = np.ones(len(drift.old)), Counter[str]()
    for name in methods:
        part = CORRECTIONS[name](drift, bounds)
        if name in MASKS:
            excluded[f"token: importance ratio out of bounds ({name})"] += int(((part == 0) & (factor != 0)).sum())
        factor *= part
    corrected, done = [], 0
    for row in rows:
        where = np.flatnonzero(row.sample.loss_mask)
        advantages = row.advantages.copy()
        advantages[where] *= factor[done : done + len(where)].astype(np.float32)
        done += len(where)
        corrected.append(replace(row, advantages=advantages))
    return Correction(rows=tuple(corrected), mismatch=_mismatch(drift.log_w, factor == 0), excluded=+excluded)


def _drift(rows: Sequence[Row]) -> Drift:
    old = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    if len(old) < len(rows):
        raise BatchError("a correction needs the log-probs of the weights before the update: Row.old_logprobs.")
    names = {name: number for number, name in enumerate(dict.fromkeys(row.sample.rollout_id for row in rows))}
    numbers = [names[row.sample.rollout_id] for row in rows]
    masks = [row.sample.loss_mask for row in rows]

    def joined(arrays: Sequence[FloatArray]) -> Doubles:
        parts = [array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0)

    return Drift(
        old=joined(old),
        behaviour=joined([row.sample.logprobs for row in rows]),
        advantages=joined([row.advantages for row in rows]),
        rollout=np.repeat(numbers, [mask.sum() for mask in masks]).astype(np.int64),
    )


def _mismatch(log_w: Doubles, masked: BoolArray) -> Mismatch:
    if not len(log_w):
        return Mismatch(weight_mean=1.0, weight_max=1.0, kl=0.0, effective=1.0, masked=0.0)
    w = _exp(log_w)
    return Mismatch(
        weight_mean=float(w.mean()),
        weight_max=float(w.max()),
        kl=float((w - 1 - log_w).mean()),
        effective=float(w.sum() ** 2 / (len(w) * (w**2).sum())),
        masked=float(masked.mean()),
    )


def _exp(values: Doubles) -> Doubles:
    exponential: Doubles = np.exp(np.clip(values, -LOG_LIMIT, LOG_LIMIT))
    return exponential
