"""The critic: one linear map from the last hidden state to what the state before a token is worth.

Schulman et al. 2017, Proximal Policy Optimization Algorithms, arXiv:1707.06347, with the trunk shared between policy
and critic (its section 5). The state before token t is everything up to t - 1, so its value is read at the very place
that predicts the token; rows that share a prefix share the values along it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

NAMES = ("value_head.weight", "value_head.bias")
"""Its parameters in a checkpoint. They are not part of what is published."""


class ValueHead(nn.Module):
    """``(M, H) -> (M,)``, float32. Zero at first: the first baseline is 0, and the first gradient leaves the trunk be.

    With `detached` the critic learns from the trunk as it is and never changes it.
    """

    def __init__(self, hidden_size: int, device: torch.device, *, detached: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))
        self._detached = detached

    def forward(self, hidden: Tensor) -> Tensor:
        seen = hidden.detach() if self._detached else hidden
        return seen.float() @ self.weight.float() + self.bias.float()

    def trained(self) -> Mapping[str, nn.Parameter]:
        """Its parameters under `NAMES`."""
        return dict(zip(NAMES, (self.weight, self.bias), strict=True))
