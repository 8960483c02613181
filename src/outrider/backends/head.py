"""From hidden states to log-probs of given tokens, without ever holding logits for all positions.

The vocabulary projection is done only where a token is trained, a slice of positions at a time, in float32: an engine's
log-prob is compared with the result, and logits rounded to bfloat16 are off by up to 0.1. For the backward pass the
probabilities are kept in the compute type, two bytes each in bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLICE = 256
"""Positions projected at a time, in float32: 256 x 49,152 logits are 48 MiB."""

BACKWARD_SLICE = 1024
"""Positions at a time in the backward pass, which needs nothing wide; each slice touches the whole projection once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Which tokens to score. M tokens at U distinct places; rows that share a place share its projection."""

    places: Tensor
    """int64 (U,): the node whose hidden state predicts."""
    temperatures: Tensor
    """float32 (U,): logits are divided by it. Log-probs never are."""
    place_of: Tensor
    """int64 (M,), ascending: index into `places`."""
    token_ids: Tensor
    """int64 (M,)."""


def token_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, both float32 (M,), from `hidden` (N, H) and the projection `weight` (V, H)."""
    keep = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    scored = _TokenLogprobs.apply(hidden[targets.places], weight, bias, targets, keep)  # type: ignore[no-untyped-call]
    logp, entropy = scored
    return logp, entropy[targets.place_of]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, keep: bool
    ) -> tuple[Tensor, Tensor]:
        wide = weight.float()
        unit = bool((targets.temperatures == 1).all())
        count = hidden.shape[0]
        logp = torch.empty(len(targets.token_ids), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(count, dtype=torch.float32, device=hidden.device)
        # Two buffers for all slices: to allocate so much anew each time costs a fifth of the whole.
        one, other = torch.empty(2, min(count, SLICE), weight.shape[0], device=hidden.device).unbind()
        kept = torch.empty(count if keep else 0, weight.shape[0], dtype=weight.dtype, device=weight.device)
        for start in range(0, count, SLICE):
            stop = min(start + SLICE, count)
            with _read_narrow(hidden.dtype == weight.dtype == torch.bfloat16):
                logits = torch.mm(hidden[start:stop].float(), wide.T, out=one[: stop - start])
            if bias is not None:
                logits += bias.float()
            if not unit:
                logits /= targets.temperatures[start:stop, None]
            everything = torch.log_softmax(logits, dim=-1, out=other[: stop - start])
            first, last = _tokens_between(targets, start, stop)
            logp[first:last] = everything[targets.place_of[first:last] - start, targets.token_ids[first:last]]
            probabilities = torch.exp(everything, out=logits)
            entropy[start:stop] = -torch.einsum("uv,uv->u", probabilities, everything)
            if keep:
                kept[start:stop] = probabilities
        ctx.targets, ctx.kept, ctx.has_bias = targets, kept, bias is not None
        ctx.save_for_backward(hidden, weight, entropy)
        ctx.set_materialize_grads(False)  # without an entropy bonus there is nothing to add to what comes back
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With p the probabilities: d logp / d logits = (onehot - p) / temperature, d entropy / d logits =
        -p (log p + entropy) / temperature."""
        hidden, weight, entropy = ctx.saved_tensors
        targets = ctx.targets
        grad = torch.zeros_like(targets.temperatures[targets.place_of]) if grads[0] is None else grads[0]
        kept, ctx.kept = ctx.kept, None  # overwritten below: there is one backward pass
        scaled = grad / targets.temperatures[targets.place_of]
        bonus = None if grads[1] is None else grads[1] / targets.temperatures
        total = torch.zeros(hidden.shape[0], device=grad.device).index_add_(0, targets.place_of, scaled)
        grad_hidden = torch.empty_like(hidden)
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros(weight.shape[0], device=weight.device) if ctx.has_bias else None
        for start in range(0, hidden.shape[0], BACKWARD_SLICE):
            stop = min(start + BACKWARD_SLICE, hidden.shape[0])
            grad_logits = kept[start:stop]
            if bonus is None:
                grad_logits.mul_(-total[start:stop, None].to(kept.dtype))
            else:
                _with_entropy(grad_logits, total[start:stop], bonus[start:stop], entropy[start:stop])
            first, last = _tokens_between(targets, start, stop)
            chosen = (targets.place_of[first:last] - start, targets.token_ids[first:last])
            grad_logits.index_put_(chosen, scaled[first:last].to(grad_logits.dtype), accumulate=True)
            grad_hidden[start:stop] = grad_logits @ weight
            if ctx.needs_input_grad[1]:
                product = grad_logits.T @ hidden[start:stop]
                # One slice is the whole; several are summed in float32.
                grad_weight = product if grad_weight is None else grad_weight.float().add_(product)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


@contextlib.contextmanager
def _read_narrow(narrow: bool) -> Iterator[None]:
    """With `narrow`, a CPU reads the factors of float32 products as bfloat16, which is what they were widened from.

    Products of two bfloat16 numbers are exact in float32, and they are still summed and stored in it: nothing is lost,
    and it takes a third of the time.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    if narrow:
        settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _with_entropy(probabilities: Tensor, total: Tensor, bonus: Tensor, entropy: Tensor) -> None:
    """Turn `probabilities` (U, V) into ``-p (total + bonus (log p + entropy))``; the others have shape (U,)."""
    surprise = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log_().float()
    factor = surprise.add_(entropy[:, None]).mul_(bonus[:, None]).add_(total[:, None]).neg_()
    probabilities.mul_(factor)


def _tokens_between(targets: Targets, start: int, stop: int) -> tuple[int, int]:
    """The slice of tokens whose place lies in ``start..stop``."""
    bounds = torch.tensor([start, stop], device=targets.place_of.device)
    first, last = torch.searchsorted(targets.place_of, bounds).tolist()
    return first, last
