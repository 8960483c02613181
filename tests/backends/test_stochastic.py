from __future__ import annotations

import torch
from torch import nn

from outrider.backends import stochastic
from outrider.backends.optimiser import AdamSettings, MasterAdamW
from outrider.backends.stochastic import StochasticAdamW, round_stochastically

SETTINGS = AdamSettings(weight_decay=0.1, max_grad_norm=1e9)


def test_rounding_goes_to_a_neighbour_and_is_right_on_average():
    low, high = torch.tensor(1.0), torch.tensor(1.0 + 2**-7)  # neighbours in bfloat16
    value = float(low + (high - low) * 0.3)
    for sign in (1, -1):
        wide = torch.full((200_000,), sign * value)
        rounded = round_stochastically(wide.clone(), torch.Generator().manual_seed(0)).float()
        assert set(rounded.unique().tolist()) == {sign * low.item(), sign * high.item()}
        up = (rounded.abs() == high).float().mean()
        assert abs(float(up) - 0.3) < 0.01
    exact = torch.randn(1000).to(torch.bfloat16)
    again = round_stochastically(exact.float(), torch.Generator().manual_seed(1))
    assert torch.equal(again, exact)  # what fits is never moved


def step_both(steps: int, monkeypatch, slice_size: int):
    monkeypatch.setattr(stochastic, "SLICE", slice_size)
    torch.manual_seed(0)
    start = {"matrix": torch.randn(30, 40).to(torch.bfloat16), "gain": torch.randn(40).to(torch.bfloat16)}
    narrow = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    wide = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    optimisers = StochasticAdamW(narrow, SETTINGS, seed=0), MasterAdamW(wide, SETTINGS)
    for number in range(steps):
        for parameters, optimiser in zip((narrow, wide), optimisers, strict=True):
            torch.manual_seed(number)
            loss = sum((parameter.float() * torch.randn(parameter.shape)).sum() for parameter in parameters.values())
            loss.backward()
            optimiser.step(1e-2)
    return start, narrow, optimisers[1]


def test_one_step_is_adamw_to_the_rounding(monkeypatch):
    start, narrow, master = step_both(1, monkeypatch, slice_size=500)
    for name, parameter in narrow.items():
        exact = master.tensors()["weights"][name]
        torch.testing.assert_close(parameter.detach().float(), exact, rtol=2**-7, atol=0)
        assert not torch.equal(parameter.detach(), start[name])


def test_small_steps_add_up_without_masters(monkeypatch):
    """Each step of 1e-5 is far below what bfloat16 resolves at 1."""
    parameter = nn.Parameter(torch.ones(5000, 2, dtype=torch.bfloat16))
    optimiser = StochasticAdamW({"weight": parameter}, AdamSettings(), seed=0)
    for _ in range(100):
        parameter.float().sum().backward()
        optimiser.step(1e-5)
    assert abs(float(parameter.detach().float().mean()) - (1 - 100 * 1e-5)) < 1e-4
