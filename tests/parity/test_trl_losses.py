"""Losses against TRL's `GRPOTrainer._compute_loss`, values and gradients, on random ragged batches, to 1e-6.

The trainer is not built: its method gets an object with the attributes that the loss reads, and log-probs as given.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from outrider.backends.language_model import Scores
from outrider.backends.rows import LossInputs
from outrider.backends.terms import loss_terms
from outrider.protocols import LossSpec
from outrider.rl.losses import Tokens
from outrider.rl.normalisation import NORMALISATIONS

LENGTH = 14  # of the padded rows: what their dr_grpo divides by


def theirs(
    batch, loss_type: str, *, beta: float = 0.0, low: float = 0.2, high: float = 0.28, importance_ratio=None, **more
):
    logp = batch.logp.clone().requires_grad_()
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.3,
        sapo_temperature_neg=2.0,
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        args=args,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, **_: t, sync_gradients=True),
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    for name, value in more.items():
        setattr(trainer, name, value)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logp, entropy(logp), None)
    ids = torch.zeros(batch.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages.abs().amax(1) * batch.advantages.sum(1).sign(),
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": importance_ratio,
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return float(loss.detach()), logp.grad


def ours(batch, spec: LossSpec, normalisation: str):
    logp, trained = batch.logp.clone().requires_grad_(), batch.mask.bool()
    counts = batch.mask.sum(1).long()
    names = [str(i) for i in range(len(counts))]
    weights = torch.from_numpy(np.repeat(NORMALISATIONS[normalisation](names, counts.tolist(), LENGTH), counts.numpy()))
    tokens = Tokens(
        logp=logp[trained],
        behaviour_logp=batch.behaviour[trained],
        old_logp=batch.old[trained],
        advantages=batch.advantages[trained],
        row=trained.nonzero()[:, 0],
    )
    given = LossInputs(
        tokens=tokens, weights=weights, reference_logp=batch.reference[trained], returns=None, old_values=None
    )
    total = loss_terms(Scores(logp=tokens.logp, entropy=entropy(logp)[trained], values=None), given, spec).total
    total.backward()
    return float(total.detach()), logp.grad


def entropy(logp: torch.Tensor) -> torch.Tensor:
    """Any function of the policy will do: (N, T)."""
    return logp.exp() * (1 + 0.1 * torch.arange(logp.shape[1]))


def same(one, other) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-8)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("loss_type", "normalisation"),
    [("grpo", "sequence"), ("grpo", "rollout"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant")],
)
def test_ppo_clip_in_every_normalisation(far_off, loss_type, normalisation):
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28)
    same(ours(far_off, spec, normalisation), theirs(far_off, loss_type))


def test_their_two_sided_clip_is_the_dual_clip(far_off):
    """INTELLECT-2's delta bounds the ratio itself, which acts where the advantage is negative."""
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=2.0)
    delta = SimpleNamespace(delta=2.0, use_bias_correction_kl=False, steps_per_generation=1)
    same(ours(far_off, spec, "token"), theirs(far_off, "dapo", args=delta))
    assert ours(far_off, spec, "token")[0] != ours(far_off, replace(spec, dual_clip=0.0), "token")[0]


def test_the_kl_term_is_k3(batch):
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, kl_coef=0.3, kl="k3")
    same(ours(batch, spec, "token"), theirs(batch, "bnpo", beta=0.3))


def test_the_entropy_bonus(batch):
    """Theirs is a mean over tokens, whatever the loss is averaged over."""
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, entropy_coef=0.2, kl_coef=0.3, kl="k3")
    same(ours(batch, spec, "token"), theirs(batch, "bnpo", beta=0.3, _entropy_bonus_enabled=True, entropy_coef=0.2))


def test_a_factor_on_the_advantage_is_their_ratio_on_the_loss_and_leaves_the_kl_alone(far_off):
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, kl_coef=0.3, kl="k3")
    ratio = torch.exp(far_off.old - far_off.behaviour).clamp(max=2.0)
    reference = theirs(
        far_off, "bnpo", beta=0.3, use_vllm=True, vllm_importance_sampling_correction=True, importance_ratio=ratio
    )
    same(ours(replace(far_off, advantages=far_off.advantages * ratio), spec, "token"), reference)


def test_cispo_has_no_lower_bound(far_off):
    """Their `epsilon_high` is the bound itself, ours the distance from 1."""
    spec = LossSpec(name="cispo", clip_low=1.0, clip_high=1.5)
    same(ours(far_off, spec, "token"), theirs(far_off, "cispo", high=2.5))


def test_sapo(far_off):
    spec = LossSpec(name="sapo", tau_positive=1.3, tau_negative=2.0)
    same(ours(far_off, spec, "sequence"), theirs(far_off, "sapo"))


def test_gspo_in_the_token_form_has_the_gradient_of_the_sequence_form(batch):
    spec = LossSpec(name="gspo", clip_low=0.05, clip_high=0.08)
    reference = theirs(batch, "grpo", low=0.05, high=0.08, importance_sampling_level="sequence")
    same(ours(batch, spec, "sequence"), reference)
