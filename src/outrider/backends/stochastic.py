"""AdamW without masters: weights and moments in bfloat16, rounded up or down at random so that small steps add up.

A value between two neighbours becomes the upper one with a probability equal to its distance from the lower, so it is
right on average where rounding to the nearest would lose the step altogether. Gupta et al. 2015, Deep Learning with
Limited Numerical Precision, arXiv:1502.02551; for language models Zamirai et al. 2020, Revisiting BFloat16 Training,
arXiv:2010.06192.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outrider.backends.optimiser import AdamSettings, FlatAdamW

SLICE = 1 << 22
"""Numbers stepped at a time, so that what is wide stays small."""


class StochasticAdamW(FlatAdamW):
    """The parameters themselves are the tables; the only float32 kept is the sum of gradients.

    The noise of step n depends on `seed` and n alone, so that a resumed run draws the same.
    """

    dtype = torch.bfloat16

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: AdamSettings,
        value_head: Mapping[str, nn.Parameter] | None = None,
        *,
        seed: int,
    ) -> None:
        for parameter in (value_head or {}).values():
            parameter.data = parameter.data.to(self.dtype)
        super().__init__(parameters, settings, value_head)
        self._seed = seed
        self._steps = 0
        self._generator = torch.Generator(self._flat["gradient"].device)

    @property
    def steps(self) -> int:
        return self._steps

    def _restored(self, steps: int) -> None:
        self._steps = steps

    def _update(self, lr: float) -> None:
        self._steps += 1
        self._generator.manual_seed((self._seed << 32) + self._steps)
        for group in self._groups:
            for start in range(group.span.start, group.span.stop, SLICE):
                part = slice(start, min(start + SLICE, group.span.stop))
                self._update_part(part, lr * group.lr_ratio, group.weight_decay)

    def _update_part(self, part: slice, lr: float, weight_decay: float) -> None:
        first, second = self._settings.betas
        weights, mean, square = (self._flat[table][part].float() for table in self.TABLES)
        gradient = self._flat["gradient"][part]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().div_(math.sqrt(1 - second**self._steps)).add_(self._settings.eps)
        weights.mul_(1 - lr * weight_decay).addcdiv_(mean, root, value=-lr / (1 - first**self._steps))
        for table, wide in zip(self.TABLES, (weights, mean, square), strict=True):
            self._flat[table][part] = round_stochastically(wide, self._generator)


def round_stochastically(wide: Tensor, generator: torch.Generator) -> Tensor:
    """`wide`, float32 and used up, to bfloat16: the 16 bits to be lost carry over with a probability of their size."""
    bits = wide.view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, generator=generator, device=bits.device)
    return bits.add_(noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)
