"""What the torch backend is compared with: plain transformers, a row at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import transformers

from outrider.backends.torch import TorchBackend
from outrider.protocols import LossSpec
from outrider.types import Row

SPEC = LossSpec(clip_low=0.9, clip_high=5.0, kl_coef=0.1)


def backend(path, **options) -> TorchBackend:
    return TorchBackend(path, **({"precision": "float32", "threads": 1} | options))


def with_reference(rows):
    rng = np.random.default_rng(1)
    return [
        replace(row, reference_logprobs=-rng.uniform(4, 7, len(row.sample.token_ids)).astype(np.float32))
        for row in rows
    ]


def gradients(made: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in made._model.module.named_parameters() if p.grad is not None}


def by_transformers(path, rows: list[Row], spec: LossSpec):
    """Loss, gradients and log-probs from the model as it is, one row at a time, with the loss spelled out."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    total = torch.zeros(())
    logprobs = []
    for row in rows:
        sample = row.sample
        ids = torch.tensor(sample.token_ids.tolist())
        logits = model(ids[None]).logits[0, :-1] / sample.temperature
        logp = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        logp = torch.cat([torch.zeros(1), logp])
        ratio = torch.exp(logp - torch.tensor(sample.logprobs))
        advantages, weights = torch.tensor(row.advantages), torch.tensor(row.weights)
        clipped = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if spec.kl_coef:
            d = torch.tensor(row.reference_logprobs) - logp
            loss = loss + spec.kl_coef * (d.exp() - 1 - d)
        total = total + (weights * loss)[torch.tensor(sample.loss_mask)].sum()
        logprobs.append(np.where(sample.loss_mask, logp.detach().numpy(), 0))
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, logprobs
