from __future__ import annotations

import math

import pytest
import torch

from outrider.protocols import LossSpec
from outrider.rl.losses import LOSSES, Tokens, k1, k2, k3

SPEC = LossSpec(clip_low=0.2, clip_high=0.28)


def tokens(ratios, advantages, rows=None) -> Tokens:
    behaviour = torch.linspace(-2.0, -0.5, len(ratios), dtype=torch.float64)
    logp = (behaviour + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    return Tokens(
        logp=logp,
        behaviour_logp=behaviour,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        row=torch.tensor(rows or [0] * len(ratios), dtype=torch.int64),
    )


def gradient(name: str, given: Tokens) -> list[float]:
    LOSSES[name](given, SPEC).loss.sum().backward()
    return given.logp.grad.tolist()


def test_ppo_clip_by_hand():
    ratios, advantages = [1.0, 1.5, 1.5, 0.5, 0.5, 1.25], [1.0, 1.0, -1.0, 1.0, -1.0, 2.0]
    out = LOSSES["ppo_clip"](tokens(ratios, advantages), SPEC)
    assert out.loss.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, -2.5])
    assert out.clipped.tolist() == [False, True, False, False, True, False]
    assert gradient("ppo_clip", tokens(ratios, advantages)) == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0, -2.5])


def test_reinforce_by_hand():
    given = tokens([1.0, 3.0], [2.0, -1.0])
    out = LOSSES["reinforce"](given, SPEC)
    assert out.loss.tolist() == pytest.approx([4.0, -0.5 + math.log(3)])
    assert not out.clipped.any()
    assert gradient("reinforce", given) == pytest.approx([-2.0, 1.0])


def test_cispo_keeps_a_gradient_beyond_the_bounds():
    given = tokens([1.5, 0.5, 1.1], [1.0, 1.0, -1.0])
    assert LOSSES["cispo"](given, SPEC).clipped.tolist() == [True, True, False]
    assert gradient("cispo", given) == pytest.approx([-1.28, -0.8, 1.1])


def test_gspo_takes_one_ratio_for_a_row():
    given = tokens([1.5, 1.0, 2.0], [1.0, 1.0, 1.0], rows=[0, 0, 1])
    out = LOSSES["gspo"](given, SPEC)
    assert out.loss.tolist() == pytest.approx([-math.sqrt(1.5), -math.sqrt(1.5), -1.28])
    assert out.clipped.tolist() == [False, False, True]
    assert gradient("gspo", given) == pytest.approx([-math.sqrt(1.5), -math.sqrt(1.5), 0.0])


def test_gspo_token_form_has_the_gradient_of_the_sequence_objective():
    ratios, advantages, rows = [1.2, 0.9, 1.1, 0.8, 1.05], [1.0, 1.0, 1.0, -0.5, -0.5], [0, 0, 0, 1, 1]
    given = tokens(ratios, advantages, rows)
    (LOSSES["gspo"](given, SPEC).loss * torch.tensor([1 / 3] * 3 + [1 / 2] * 2)).sum().backward()
    same = tokens(ratios, advantages, rows)
    first = torch.exp(same.log_ratio[:3].mean())
    second = torch.exp(same.log_ratio[3:].mean())
    (-(first * 1.0 + second * -0.5)).backward()
    torch.testing.assert_close(given.logp.grad, same.logp.grad)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    given = tokens([1.0] * 4, [1.0, -2.0, 0.0, 0.5], rows=[0, 0, 1, 1])
    assert gradient(name, given) == pytest.approx([-1.0, 2.0, 0.0, -0.5])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_tokens_no_loss(name):
    assert LOSSES[name](tokens([], []), SPEC).loss.shape == (0,)


def test_kl_estimators_agree_with_the_exact_divergence():
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for estimate in (k1, k3):  # the expectation under the policy is the divergence
        assert float((policy * estimate(policy.log(), reference.log())).sum()) == pytest.approx(exact)
    assert (k3(policy.log(), reference.log()) >= 0).all()
    logp = policy.log().requires_grad_()
    (policy * k2(logp, reference.log())).sum().backward()
    torch.testing.assert_close(logp.grad, policy * (policy / reference).log())
