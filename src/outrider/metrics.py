"""Lines of metrics.jsonl: what a step saw, what it did to the weights, and where its time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.protocols import OptimStats, StepStats
from outrider.rl.batch import Batch
from outrider.types import Json, Rollout, Sample


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


def rollout_record(
    step: int, rollouts: Sequence[Rollout], samples: Sequence[Sample], batch: Batch, threshold: float
) -> Json:
    """What the rollouts of a step gave. Rates are over scored rollouts."""
    rewards = np.array([r.reward for r in rollouts if r.reward is not None], dtype=np.float64)
    return {
        "kind": "step",
        "step": step,
        "reward_mean": float(rewards.mean()) if rewards.size else 0.0,
        "reward_std": float(rewards.std()) if rewards.size else 0.0,
        "success": float((rewards >= threshold).mean()) if rewards.size else 0.0,
        "rollouts": len(rollouts),
        "groups": batch.groups,
        "groups_trained": batch.groups_trained,
        "samples": len(samples),
        "sampled_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "oldest_version": min(
            (int(sample.versions[sample.loss_mask].min()) for sample in samples if sample.loss_mask.any()), default=None
        ),
    }


def update_record(stats: StepStats, optim: OptimStats) -> dict[str, Any]:
    """What the update of a step did."""
    critic = {"value_loss": stats.value_loss, "value_explained_variance": stats.value_explained_variance}
    return {
        "loss": stats.loss,
        "tokens": stats.tokens,
        "tokens_computed": stats.tokens_computed,
        "tokens_recomputed": stats.tokens_recomputed,
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
        **{name: value for name, value in critic.items() if value is not None},
    }
