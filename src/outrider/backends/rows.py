"""Rows as a backend takes them: checked, and as the tensors that a loss wants of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.backends.language_model import MicroBatch, Scores
from outrider.errors import BatchError
from outrider.protocols import LossSpec
from outrider.rl.losses import Tokens
from outrider.types import FloatArray, Row, Sample

OPTIONAL = ("reference_logprobs", "old_logprobs", "returns", "old_values")
"""Arrays that either all rows of a batch have or none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Of a micro-batch's M trained tokens; every tensor has shape (M,)."""

    tokens: Tokens
    weights: Tensor
    reference_logp: Tensor | None
    returns: Tensor | None
    old_values: Tensor | None


def loss_inputs(rows: Sequence[Row], batch: MicroBatch, scores: Scores) -> LossInputs:
    """Look up what `rows` say on the trained tokens of `batch`, in the order of `scores`."""
    _, row = np.unique(batch.row, return_inverse=True)
    device = scores.logp.device

    def column(arrays: Sequence[FloatArray]) -> Tensor:
        values = np.array([arrays[r][p] for r, p in zip(batch.row, batch.position, strict=True)], dtype=np.float32)
        return torch.from_numpy(values).to(device)

    def optional(arrays: Sequence[FloatArray | None]) -> Tensor | None:
        given = [array for array in arrays if array is not None]
        return column(given) if given else None

    tokens = Tokens(
        logp=scores.logp,
        behaviour_logp=column([item.sample.logprobs for item in rows]),
        old_logp=optional([item.old_logprobs for item in rows]),
        advantages=column([item.advantages for item in rows]),
        row=torch.from_numpy(row.astype(np.int64)).to(device),
    )
    return LossInputs(
        tokens=tokens,
        weights=column([item.weights for item in rows]),
        reference_logp=optional([item.reference_logprobs for item in rows]),
        returns=optional([item.returns for item in rows]),
        old_values=optional([item.old_values for item in rows]),
    )


def check_rows(rows: Sequence[Row], loss: LossSpec, vocabulary: int, *, critic: bool) -> None:
    """Raise `BatchError` on rows that must not be trained on. `critic` says whether there is a value head."""
    for row in rows:
        name, total = row.sample.rollout_id, len(row.sample.token_ids)
        arrays = {"advantages": row.advantages, "weights": row.weights, "logprobs": row.sample.logprobs}
        arrays |= {field: getattr(row, field) for field in OPTIONAL if getattr(row, field) is not None}
        if loss.kl_coef and row.reference_logprobs is None:
            raise BatchError(f"rollout {name}: train.kl_coef is set, but its row has no reference log-probs.")
        if row.returns is not None and not critic:
            raise BatchError(f"rollout {name}: its row has returns, but the backend was made without a value head.")
        if row.old_values is not None and row.returns is None:
            raise BatchError(f"rollout {name}: its row has old_values but no returns.")
        for field, values in arrays.items():
            if len(values) != total:
                raise BatchError(f"rollout {name}: {field} has length {len(values)} for {total} tokens.")
            if not np.isfinite(values).all():
                raise BatchError(f"rollout {name}: {field} holds a number that is not finite.")
        check_sample(row.sample, vocabulary)
    for field in OPTIONAL:
        if len({getattr(row, field) is None for row in rows}) > 1:
            raise BatchError(f"some rows have {field} and some have not.")


def check_sample(sample: Sample, vocabulary: int) -> None:
    """Raise `BatchError` where the model can't score the trained tokens of `sample`."""
    name = sample.rollout_id
    if sample.loss_mask[0]:
        raise BatchError(f"rollout {name}: the first token of a row cannot be trained, it has no context.")
    if not 0 <= sample.token_ids.min() <= sample.token_ids.max() < vocabulary:
        raise BatchError(f"rollout {name}: a token id is outside the model's vocabulary of {vocabulary}.")
    if sample.temperature <= 0:
        raise BatchError(f"rollout {name}: a temperature of {sample.temperature} has no log-probs.")
