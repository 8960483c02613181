"""What a request asks of the sampler, and the sampler.

**Log-probs are those of the distribution that was sampled from.** Logits are divided by the temperature, truncated by
`top_k` then `top_p`, renormalised, and the log of that is what is reported: ``log_softmax(truncate(logits / T))``.
Greedy decoding (temperature 0) has no distribution of its own; there the log-prob is ``log_softmax(logits)``, that is
T = 1 without truncation, and the token is the most likely one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOP_P_CANDIDATES = 512
"""`top_p` looks at this many of the most likely tokens before it sorts the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one sequence is sampled and when it ends. Defaults are OpenAI's."""

    max_tokens: int
    temperature: float = 1.0
    """0 for greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 for no limit."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text. They stay among the ids."""
    top_logprobs: int = 0
    """How many of the most likely tokens are reported at each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What was sampled for a batch of R rows."""

    ids: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]
    """Per row the `top_logprobs` most likely tokens with their log-probs, best first."""


def generator(seed: int, choice: int) -> random.Random:
    """The source of one sequence's uniform numbers: depends on seed and choice alone, never on the batch."""
    return random.Random(f"{seed}/{choice}")


def shape_logits(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Apply temperature and truncation, row by row. `logits` is float32 (R, V) and may be overwritten."""
    if any(row.temperature not in (0.0, 1.0) for row in rows):
        scale = torch.tensor([row.temperature or 1.0 for row in rows], device=logits.device)
        logits = logits.div_(scale[:, None])
    cut = [i for i, row in enumerate(rows) if row.temperature > 0 and (row.top_k > 0 or row.top_p < 1.0)]
    if cut:
        index = torch.tensor(cut, device=logits.device)
        logits[index] = _truncate(logits[index], [rows[i] for i in cut])
    return logits


def _truncate(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Set everything outside top-k and then the nucleus to -inf. At least one token always stays. (R, V) -> (R, V)"""
    vocabulary = logits.shape[1]
    k = torch.tensor([min(row.top_k or vocabulary, vocabulary) for row in rows], device=logits.device)
    p = torch.tensor([row.top_p for row in rows], device=logits.device)
    width = min(vocabulary, max([TOP_P_CANDIDATES, *(row.top_k for row in rows)]))
    log_total = torch.logsumexp(logits, -1, keepdim=True)
    while True:
        values, order = torch.topk(logits, width, dim=-1)
        rank = torch.arange(width, device=logits.device)
        keep = rank < k[:, None]
        # The nucleus is cut from what top-k left, so its mass is counted relative to that.
        mass = torch.where(keep, (values - log_total).exp(), 0.0)
        known = torch.where(k <= width, mass.sum(-1), 1.0)
        before = mass.cumsum(-1) - mass
        inside = before < (p * known)[:, None]
        # Wide enough if for each row the nucleus, or top-k, ends among the candidates.
        if width == vocabulary or bool((~inside[:, -1] | (k <= width)).all()):
            break
        width = vocabulary
    keep &= inside | (p >= 1.0)[:, None]
    keep[:, 0] = True
    return torch.full_like(logits, -torch.inf).scatter_(1, order, values.masked_fill(~keep, -torch.inf))


def sample(logits: Tensor, rows: Sequence[Sampling], uniforms: Sequence[float]) -> Draws:
    """Draw one token a row. `logits` float32 (R, V), may be overwritten; `uniforms` are R numbers in [0, 1).

    Inverse transform sampling: a cumulative sum and one uniform number a row, where Gumbel noise needs V of them.
    A row whose logits are not finite gets the log-prob NaN, for the caller to refuse.
    """
    logits = shape_logits(logits, rows)
    best, best_ids = logits.max(-1, keepdim=True)
    cdf = (logits - best).exp_().cumsum_(-1)
    total = cdf[:, -1:]
    # Strictly below the total, so that the search ends on a token with mass whatever the rounding does.
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
    target = torch.minimum(target.to(cdf.dtype), torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cdf, target, right=True).clamp_(max=logits.shape[1] - 1)
    greedy = torch.tensor([row.temperature == 0 for row in rows], device=logits.device)[:, None]
    ids = torch.where(greedy, best_ids, drawn)
    log_total = best + total.log()
    logprobs = logits.gather(1, ids) - log_total
    ids_list: list[int] = ids[:, 0].tolist()
    return Draws(ids=ids_list, logprobs=logprobs[:, 0].tolist(), tops=_tops(logits, log_total, rows))


def _tops(logits: Tensor, log_total: Tensor, rows: Sequence[Sampling]) -> list[list[tuple[int, float]]]:
    tops: list[list[tuple[int, float]]] = [[] for _ in rows]
    wanted = [i for i, row in enumerate(rows) if row.top_logprobs]
    if wanted:
        width = min(max(rows[i].top_logprobs for i in wanted), logits.shape[1])
        index = torch.tensor(wanted, device=logits.device)
        values, order = torch.topk(logits[index] - log_total[index], width, dim=-1)
        for i, row_ids, row_values in zip(wanted, order.tolist(), values.tolist(), strict=True):
            tops[i] = list(zip(row_ids, row_values, strict=True))[: rows[i].top_logprobs]
    return tops
