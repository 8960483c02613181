"""Losses, normalisations and corrections against verl, values and gradients, on random ragged batches, to 1e-6."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import (
    compute_offpolicy_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

from outrider.protocols import LossSpec
from outrider.rl.correction import Bounds, correct
from outrider.rl.losses import KL, LOSSES, Tokens, value_loss
from outrider.rl.normalisation import NORMALISATIONS

MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
LENGTH = 7


def tokens(batch, logp: torch.Tensor) -> Tokens:
    trained = batch.mask.bool()
    return Tokens(
        logp=logp[trained],
        behaviour_logp=batch.behaviour[trained],
        old_logp=batch.old[trained],
        advantages=batch.advantages[trained],
        row=trained.nonzero()[:, 0],
    )


def weights(batch, name: str) -> torch.Tensor:
    """One for each trained token."""
    counts = batch.mask.sum(1).long()
    per_row = NORMALISATIONS[name]([str(i) for i in range(len(counts))], counts.tolist(), LENGTH)
    return torch.from_numpy(np.repeat(per_row, counts.numpy()))


def ours(batch, spec: LossSpec, normalisation: str) -> tuple[float, torch.Tensor]:
    logp = batch.logp.clone().requires_grad_()
    loss = (weights(batch, normalisation) * LOSSES[spec.name](tokens(batch, logp), spec).loss).sum()
    loss.backward()
    return float(loss.detach()), logp.grad


def theirs(batch, name: str, normalisation: str, rollout_is_weights=None, **settings) -> tuple[float, torch.Tensor]:
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **settings)
    config.global_batch_info["loss_scale_factor"] = LENGTH
    logp = batch.logp.clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        batch.old, logp, batch.advantages, batch.mask, MODES[normalisation], config, rollout_is_weights
    )
    loss.backward()
    return float(loss.detach()), logp.grad


def same(one, other) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-8)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("normalisation", sorted(MODES))
class TestLosses:
    def test_ppo_clip_with_dual_clip(self, far_off, normalisation):
        spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
        settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
        same(ours(far_off, spec, normalisation), theirs(far_off, "vanilla", normalisation, **settings))
        assert LOSSES["ppo_clip"](tokens(far_off, far_off.logp), spec).clipped.any()

    def test_ppo_clip_without(self, batch, normalisation):
        spec = LossSpec(name="ppo_clip", clip_low=0.1, clip_high=0.3)
        settings = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1e9}
        same(ours(batch, spec, normalisation), theirs(batch, "vanilla", normalisation, **settings))

    def test_gspo(self, batch, normalisation):
        spec = LossSpec(name="gspo", clip_low=0.02, clip_high=0.04)
        settings = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.04}
        same(ours(batch, spec, normalisation), theirs(batch, "gspo", normalisation, **settings))

    def test_cispo(self, far_off, normalisation):
        spec = LossSpec(name="cispo", clip_low=0.5, clip_high=1.0)
        settings = {"clip_ratio_low": 0.5, "clip_ratio_high": 1.0}
        same(ours(far_off, spec, normalisation), theirs(far_off, "cispo", normalisation, **settings))

    def test_reinforce(self, batch, normalisation):
        same(ours(batch, LossSpec(name="reinforce"), normalisation), theirs(batch, "gpg", normalisation))

    @pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
    def test_dppo(self, far_off, normalisation, name):
        spec = LossSpec(name=name, divergence=0.15)
        settings = {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio": 0.15, "clip_ratio_c": 20.0}
        same(ours(far_off, spec, normalisation), theirs(far_off, name, normalisation, **settings))
        assert LOSSES[name](tokens(far_off, far_off.logp), spec).clipped.any()


def test_sapo(far_off):
    """verl averages this one by sequence whatever it is told."""
    spec = LossSpec(name="sapo", tau_positive=1.3, tau_negative=2.0)
    same(ours(far_off, spec, "sequence"), theirs(far_off, "sapo", "sequence", tau_pos=1.3, tau_neg=2.0))


def test_per_rollout_is_their_mean_over_sequences(batch):
    """Where a rollout is one row."""
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28)
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
    same(ours(batch, spec, "rollout"), theirs(batch, "vanilla", "sequence", **settings))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl(batch, name):
    logp = batch.logp.clone().requires_grad_()
    other = batch.logp.clone().requires_grad_()
    one = KL[name](logp, batch.reference)
    torch.testing.assert_close(one, core_algos.kl_penalty(other, batch.reference, name), rtol=1e-6, atol=1e-9)
    one.sum().backward()
    core_algos.kl_penalty(other, batch.reference, name).sum().backward()
    torch.testing.assert_close(logp.grad, other.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("straight_through", ["k1+", "k3+"])
def test_k2_has_the_gradient_of_their_straight_through_estimators(batch, straight_through):
    """They show one estimate and descend on another; here it is `k2` outright."""
    logp, other = batch.logp.clone().requires_grad_(), batch.logp.clone().requires_grad_()
    KL["k2"](logp, batch.reference).sum().backward()
    core_algos.kl_penalty(other, batch.reference, straight_through).sum().backward()
    torch.testing.assert_close(logp.grad, other.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("normalisation", sorted(MODES))
def test_value_loss(batch, normalisation):
    rng = np.random.default_rng(1)
    old, returns, now = (torch.from_numpy(rng.normal(size=batch.mask.shape)) for _ in range(3))
    trained, one, other = batch.mask.bool(), now.clone().requires_grad_(), now.clone().requires_grad_()
    loss = value_loss(one[trained], returns[trained], old[trained], LossSpec(value_clip=0.4)).loss
    mine = (weights(batch, normalisation) * loss).sum()
    reference, _ = core_algos.compute_value_loss(
        other, returns, old, batch.mask, 0.4, MODES[normalisation], loss_scale_factor=LENGTH
    )
    mine.backward()
    reference.backward()
    assert float(mine.detach()) == pytest.approx(float(reference.detach()), rel=1e-6)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-9)


# -- corrections -------------------------------------------------------------------------------------------------------


def factors(batch, methods, bounds=Bounds()) -> np.ndarray:
    """(N, T)."""
    return np.stack([row.advantages[1:] for row in correct(batch.rows(), methods, bounds).rows])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(far_off, level):
    reference, _ = compute_rollout_correction_weights(far_off.old - far_off.behaviour, far_off.mask, level, 2.0)
    got = factors(far_off, [f"{level}_tis"], Bounds(tis_cap=2.0))
    np.testing.assert_allclose(got, (reference * far_off.mask).numpy(), rtol=1e-6, atol=1e-9)


def test_the_ratio_of_a_long_rollout(long_rollouts):
    """1,000 tokens, whose log-ratios add up: in float64 as close as any other; verl in float32 as its sum allows."""
    batch = long_rollouts
    got = factors(batch, ["sequence_tis"], Bounds(tis_cap=1e9))[:, 0]
    wide, narrow = (
        compute_rollout_correction_weights((batch.old.to(t) - batch.behaviour.to(t)), batch.mask.to(t), "sequence", 1e9)
        for t in (torch.float64, torch.float32)
    )
    np.testing.assert_allclose(got, wide[0][:, 0], rtol=1e-6)
    rounding = 2**-24 * 1000 * (batch.old - batch.behaviour).abs().sum(1)  # of 1,000 additions, at the worst
    assert (abs(narrow[0][:, 0] / wide[0][:, 0] - 1) <= torch.expm1(rounding)).all()


def test_icepop(far_off):
    reference, _ = compute_rollout_correction_weights(far_off.old - far_off.behaviour, far_off.mask, "token", "0.5_3.0")
    got = factors(far_off, ["icepop"], Bounds(icepop_low=0.5, icepop_high=3.0))
    np.testing.assert_allclose(got, (reference * far_off.mask).numpy(), rtol=1e-6, atol=1e-9)


def test_geometric_mask(far_off):
    """verl bounds the inverse of the ratio (its k1), so low and high change places."""
    reference, _ = compute_rollout_rejection_mask(
        far_off.old - far_off.behaviour, far_off.mask, "seq_mean_k1", f"{1 / 1.2}_{1 / 0.9}"
    )
    got = factors(far_off, ["geometric"], Bounds(geometric_low=0.9, geometric_high=1.2))
    np.testing.assert_array_equal(got, reference.numpy())
    assert 0 < got.sum() < batch_tokens(far_off)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_masks(far_off, name):
    """Where verl's loss of that name has no gradient, with the old policy in the place of the one in training."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=0.15, clip_ratio_low=0.15, clip_ratio_high=0.15
    )
    logp = far_off.old.float().double().requires_grad_()
    behaviour = far_off.behaviour.float().double()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        behaviour, logp, far_off.advantages, far_off.mask, "token-mean", config
    )
    loss.backward()
    made = correct(
        [
            replace(row, advantages=np.array([0.0, *a], np.float32))
            for row, a in zip(far_off.rows(), far_off.advantages.numpy(), strict=True)
        ],
        [name],
    )
    kept = np.stack([row.advantages[1:] for row in made.rows]) != 0
    np.testing.assert_array_equal(kept, (logp.grad != 0).numpy())
    assert 0 < kept.sum() < batch_tokens(far_off)


def test_a_factor_on_the_advantage_is_theirs_on_the_loss(far_off):
    ratio, _ = compute_rollout_correction_weights(far_off.old - far_off.behaviour, far_off.mask, "token", 2.0)
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
    reference = theirs(far_off, "vanilla", "token", rollout_is_weights=ratio, **settings)
    spec = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    corrected = replace(far_off, advantages=far_off.advantages * ratio)
    same(ours(corrected, spec, "token"), reference)


def test_statistics(batch):
    reference = compute_offpolicy_metrics(batch.old, batch.behaviour, batch.mask)
    got = correct(batch.rows(), []).mismatch
    assert got.kl == pytest.approx(reference["k3_kl"], rel=1e-6)
    _, metrics = compute_rollout_correction_weights(batch.old - batch.behaviour, batch.mask, "token", 1e9)
    assert got.weight_mean == pytest.approx(metrics["rollout_is_mean"], rel=1e-6)
    assert got.weight_max == pytest.approx(metrics["rollout_is_max"], rel=1e-6)
    assert got.effective == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-6)


def batch_tokens(batch) -> int:
    return int(batch.mask.sum())
