from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.protocols import LossSpec
from outrider.rl.losses import KL, LOSSES, Tokens, k1, k2, k3, value_loss

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


def gradient(name: str, given: Tokens, spec: LossSpec = SPEC) -> list[float]:
    LOSSES[name](given, spec).loss.sum().backward()
    return given.logp.grad.tolist()


def test_ppo_clip_by_hand():
    ratios, advantages = [1.0, 1.5, 1.5, 0.5, 0.5, 1.25], [1.0, 1.0, -1.0, 1.0, -1.0, 2.0]
    out = LOSSES["ppo_clip"](tokens(ratios, advantages), SPEC)
    assert out.loss.tolist() == pytest.approx([-1.0, -1.28, 1.5, -0.5, 0.8, -2.5])
    assert out.clipped.tolist() == [False, True, False, False, True, False]
    assert gradient("ppo_clip", tokens(ratios, advantages)) == pytest.approx([-1.0, 0.0, 1.5, -0.5, 0.0, -2.5])


def test_dual_clip_by_hand():
    """A ratio of 50 with a negative advantage would move the policy fifty times as far as one of 1."""
    ratios, advantages = [50.0, 2.0, 50.0, 0.5], [-1.0, -1.0, 1.0, -1.0]
    spec = replace(SPEC, dual_clip=3.0)
    out = LOSSES["ppo_clip"](tokens(ratios, advantages), spec)
    assert out.loss.tolist() == pytest.approx([3.0, 2.0, -1.28, 0.8])
    assert out.clipped.tolist() == [True, False, True, True]
    assert gradient("ppo_clip", tokens(ratios, advantages), spec) == pytest.approx([0.0, 2.0, 0.0, 0.0])
    assert gradient("ppo_clip", tokens(ratios, advantages)) == pytest.approx([50.0, 2.0, 0.0, 0.0])


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


def test_the_mean_of_a_long_row_is_added_up_in_float64():
    """gspo's bounds are 3e-4; a sum of 300,000 numbers in float32 is off by more."""
    zeros = torch.zeros(300_000)
    given = Tokens(logp=zeros, behaviour_logp=zeros, advantages=zeros, row=torch.zeros(300_000, dtype=torch.int64))
    assert given.row_mean(torch.full((300_000,), 0.1))[0].item() == pytest.approx(0.1, rel=1e-6)


def test_gspo_token_form_has_the_gradient_of_the_sequence_objective():
    ratios, advantages, rows = [1.2, 0.9, 1.1, 0.8, 1.05], [1.0, 1.0, 1.0, -0.5, -0.5], [0, 0, 0, 1, 1]
    given = tokens(ratios, advantages, rows)
    (LOSSES["gspo"](given, SPEC).loss * torch.tensor([1 / 3] * 3 + [1 / 2] * 2)).sum().backward()
    same = tokens(ratios, advantages, rows)
    first = torch.exp(same.log_ratio[:3].mean())
    second = torch.exp(same.log_ratio[3:].mean())
    (-(first * 1.0 + second * -0.5)).backward()
    torch.testing.assert_close(given.logp.grad, same.logp.grad)


def test_sapo_by_hand():
    spec = replace(SPEC, tau_positive=1.0, tau_negative=2.0)
    out = LOSSES["sapo"](tokens([1.0, 2.0, 2.0], [1.0, 1.0, -1.0]), spec)
    sigmoid = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(-2.0))
    assert out.loss.tolist() == pytest.approx([-2.0, -4 * sigmoid[0], 2 * sigmoid[1]])
    slopes = gradient("sapo", tokens([1.0, 2.0, 2.0], [1.0, 1.0, -1.0]), spec)
    expected = [-1.0, -2 * 4 * sigmoid[0] * (1 - sigmoid[0]), 2 * 4 * sigmoid[1] * (1 - sigmoid[1])]
    assert slopes == pytest.approx(expected)  # d ratio / d logp is the ratio
    assert abs(slopes[2]) < abs(slopes[1])  # the gate of what went badly closes faster


def test_dppo_masks_by_probability_not_by_ratio():
    old = torch.tensor([0.5, 0.5, 0.001, 0.5], dtype=torch.float64)
    new = torch.tensor([0.7, 0.7, 0.01, 0.3], dtype=torch.float64)  # the third has a ratio of ten, and hardly moved
    for name, limit in (("dppo_tv", 0.15), ("dppo_kl", 0.08)):
        given = Tokens(
            logp=new.log().requires_grad_(),
            behaviour_logp=old.log(),
            advantages=torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64),
            row=torch.zeros(4, dtype=torch.int64),
        )
        spec = replace(SPEC, divergence=limit)
        out = LOSSES[name](given, spec)
        assert out.clipped.tolist() == [True, False, False, False], name  # only the push further away is refused
        assert gradient(name, given, spec) == pytest.approx([0.0, 1.4, -10.0, -0.6])


def test_binary_kl_by_hand():
    p, q = torch.tensor([0.7]), torch.tensor([0.5])
    exact = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    given = Tokens(
        logp=p.log(), behaviour_logp=q.log(), advantages=torch.ones(1), row=torch.zeros(1, dtype=torch.int64)
    )
    assert LOSSES["dppo_kl"](given, replace(SPEC, divergence=exact - 1e-5)).clipped.item()
    assert not LOSSES["dppo_kl"](given, replace(SPEC, divergence=exact + 1e-5)).clipped.item()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    given = tokens([1.0] * 4, [1.0, -2.0, 0.0, 0.5], rows=[0, 0, 1, 1])
    spec = replace(SPEC, dual_clip=3.0, tau_positive=1.0, tau_negative=1.7)
    assert gradient(name, given, spec) == pytest.approx([-1.0, 2.0, 0.0, -0.5])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_tokens_no_loss(name):
    assert LOSSES[name](tokens([], []), SPEC).loss.shape == (0,)


@given(
    ratios=st.lists(st.floats(0.2, 4.0), min_size=1, max_size=6),
    data=st.data(),
    name=st.sampled_from(sorted(LOSSES)),
)
def test_losses_are_homogeneous_in_the_advantages(ratios, data, name):
    """What `outrider.rl.correction` relies on: a factor on the advantage is a factor on the loss and its gradient."""
    assume(all(abs(ratio - kink) > 1e-3 for ratio in ratios for kink in (0.8, 1.28, 3.0)))  # no gradient to speak of
    count = len(ratios)
    advantages = data.draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count))
    factors = data.draw(st.lists(st.sampled_from([0.0, 0.3, 2.0]), min_size=count, max_size=count))
    spec = replace(SPEC, dual_clip=3.0, divergence=0.05)
    plain, scaled = (
        tokens(ratios, advantages),
        tokens(ratios, [a * f for a, f in zip(advantages, factors, strict=True)]),
    )
    one, other = LOSSES[name](plain, spec).loss, LOSSES[name](scaled, spec).loss
    weight = torch.tensor(factors, dtype=torch.float64)
    torch.testing.assert_close(other, one * weight)
    (one * weight).sum().backward()
    other.sum().backward()
    torch.testing.assert_close(scaled.logp.grad, plain.logp.grad)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_ratio_is_to_the_old_policy_where_it_is_given(name):
    given = tokens([1.5, 0.5], [1.0, -1.0])
    old = replace(given, logp=given.logp.detach().clone().requires_grad_(), old_logp=given.logp.detach())
    assert gradient(name, old) == pytest.approx([-1.0, 1.0])  # as on policy, whatever sampled the tokens


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_ratio_never_becomes_infinite(name):
    given = replace(tokens([1.0, 1.0], [1.0, 0.0]), behaviour_logp=torch.tensor([-800.0, -800.0], dtype=torch.float64))
    out = LOSSES[name](given, SPEC)
    assert out.loss.isfinite().all()
    out.loss.sum().backward()
    assert given.logp.grad.isfinite().all()


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
    assert dict(KL) == {"k1": k1, "k2": k2, "k3": k3}


def test_value_loss_by_hand():
    values = torch.tensor([1.0, 1.0, 1.0, 1.05], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    old = torch.tensor([0.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    out = value_loss(values, returns, old, replace(SPEC, value_clip=0.2))
    # the first has run ahead to 1 from 0: it counts as 0.2, and gets no gradient
    assert out.loss.tolist() == pytest.approx([1.8**2 / 2, 0.5, 0.5, 0.95**2 / 2])
    assert out.clipped.tolist() == [True, False, False, False]
    out.loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.0, -1.0, -0.95])
    for free in (
        value_loss(values, returns, None, SPEC),
        value_loss(values, returns, old, replace(SPEC, value_clip=0)),
    ):
        assert free.loss.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.95**2 / 2])


def test_R05_dividing_log_probs_by_the_temperature_is_another_distribution():
    logits, temperature = np.array([2.0, 0.0]), 0.5

    def log_softmax(values):
        return values - np.log(np.exp(values).sum())

    raw = log_softmax(logits)[1]
    true = log_softmax(logits / temperature)[1]
    assert raw == pytest.approx(-2.1269, abs=1e-4)
    assert true == pytest.approx(-4.0181, abs=1e-4)
    assert abs(raw / temperature - true) > 0.2
