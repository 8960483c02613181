from __future__ import annotations

import pytest
import torch

from outrider.backends import head
from outrider.backends.head import Targets, token_logprobs


def test_R05_temperature_divides_logits_never_logprobs():
    targets = Targets(
        places=torch.tensor([0]),
        temperatures=torch.tensor([0.5]),
        place_of=torch.tensor([0]),
        token_ids=torch.tensor([1]),
    )
    logp, _ = token_logprobs(torch.eye(2)[:1], torch.tensor([[2.0, 0.0], [0.0, 0.0]]), None, targets)
    assert float(logp[0]) == pytest.approx(-4.0181, abs=1e-4)


@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_equal_autograd(monkeypatch, with_bias):
    monkeypatch.setattr(head, "SLICE", 4)
    monkeypatch.setattr(head, "BACKWARD_SLICE", 5)
    torch.manual_seed(0)
    hidden = torch.randn(20, 8, requires_grad=True)
    weight = torch.randn(30, 8, requires_grad=True)
    bias = torch.randn(30, requires_grad=True) if with_bias else None
    place_of = torch.tensor([0, 1, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8])  # places shared by tokens, tokens repeated
    targets = Targets(
        places=torch.tensor([3, 3, 0, 7, 9, 11, 12, 13, 19]),  # a node at two temperatures
        temperatures=torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 1.0, 2.0, 1.0]),
        place_of=place_of,
        token_ids=torch.tensor([4, 4, 4, 9, 0, 1, 29, 5, 5, 5, 8, 2, 2]),
    )
    logp, entropy = token_logprobs(hidden, weight, bias, targets)
    logits = hidden[targets.places] @ weight.T + (bias if bias is not None else 0)
    plain = torch.log_softmax(logits / targets.temperatures[:, None], -1)
    expected = plain[place_of, targets.token_ids]
    torch.testing.assert_close(logp, expected)
    surprise = -(plain.exp() * plain).sum(-1)[place_of]
    torch.testing.assert_close(entropy, surprise)
    scale = torch.randn(len(place_of))
    inputs = [item for item in (hidden, weight, bias) if item is not None]
    bonus = torch.randn(len(place_of))
    for terms in ([0], [1], [0, 1]):  # the log-probs, the entropies, both; each forward pass has one backward pass
        scored = token_logprobs(hidden, weight, bias, targets)
        scales = (scale, bonus)
        ours = torch.autograd.grad(sum((scored[i] * scales[i]).sum() for i in terms), inputs)
        total = sum(((expected, surprise)[i] * scales[i]).sum() for i in terms)
        for one, other in zip(ours, torch.autograd.grad(total, inputs, retain_graph=True), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_logits_are_as_exact_as_float32_products_of_the_same_numbers():
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 64).bfloat16(), torch.randn(2000, 64).bfloat16()
    count = torch.arange(600)
    targets = Targets(places=count, temperatures=torch.ones(600), place_of=count, token_ids=count)
    before = torch.backends.mkldnn.matmul.fp32_precision
    logp, _ = token_logprobs(hidden, weight, None, targets)
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1)[count, count]
    assert float((logp - exact).abs().max()) < 1e-4  # logits reach 30: rounded to bfloat16 they are off by 0.1
    rounded = torch.log_softmax((hidden @ weight.T).float(), -1)[count, count]
    assert float((rounded - exact).abs().max()) > 0.01
