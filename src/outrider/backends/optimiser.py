"""AdamW over flat tables: what the two precision policies share, and the one with float32 masters.

Each of weights, moments and gradient lies in one flat tensor, allocated once: hundreds of small ones, made and freed
between activations, leave holes of half a gigabyte in the heap.

Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.errors import RunError
from outrider.protocols import OptimStats


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Of matrices; gains, biases and the value head are not decayed."""
    max_grad_norm: float = 1.0
    """For the policy's gradient and, on its own, for the value head's."""
    value_lr_ratio: float = 1.0
    """Learning rate of the value head as a multiple of that of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that lie next to each other and are stepped alike."""

    span: slice
    weight_decay: float
    lr_ratio: float


class FlatAdamW(abc.ABC):
    """Holds the weights and moments of parameters, by name, and gathers their gradients as micro-batches go by."""

    TABLES = ("weights", "exp_avg", "exp_avg_sq")
    """What a checkpoint holds."""
    dtype: ClassVar[torch.dtype]
    """Of `TABLES`. The gradient is summed in float32."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: AdamSettings,
        value_head: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        # Matrices first, then gains and biases, which are not decayed, then the value head.
        policy = sorted(parameters.items(), key=lambda item: item[1].ndim < 2)
        self._parameters = dict(policy) | dict(value_head or {})
        self._settings = settings
        self._has_gradient = False
        total = sum(parameter.numel() for parameter in self._parameters.values())
        device = next(iter(self._parameters.values())).device
        self._flat = {name: torch.zeros(total, dtype=self.dtype, device=device) for name in self.TABLES}
        self._flat["gradient"] = torch.zeros(total, device=device)
        self._views = {name: self._split(flat) for name, flat in self._flat.items()}
        matrices = sum(parameter.numel() for parameter in parameters.values() if parameter.ndim >= 2)
        self._policy_size = sum(parameter.numel() for parameter in parameters.values())
        groups = (
            Group(span=slice(0, matrices), weight_decay=settings.weight_decay, lr_ratio=1.0),
            Group(span=slice(matrices, self._policy_size), weight_decay=0.0, lr_ratio=1.0),
            Group(span=slice(self._policy_size, total), weight_decay=0.0, lr_ratio=settings.value_lr_ratio),
        )
        self._groups = [group for group in groups if group.span.start < group.span.stop]
        for name, parameter in self._parameters.items():
            self._adopt(name, parameter)

    def step(self, lr: float) -> OptimStats:
        """Clip to `max_grad_norm`, step, zero the gradient. Without a gradient, or with one not finite, do nothing."""
        gradient = self._flat["gradient"]
        parts = gradient[: self._policy_size], gradient[self._policy_size :]
        norms = [float(torch.linalg.vector_norm(part)) for part in parts]
        skipped = not self._has_gradient or not all(math.isfinite(norm) for norm in norms)
        if not skipped:
            for part, norm in zip(parts, norms, strict=True):
                if norm > self._settings.max_grad_norm:
                    part.mul_(self._settings.max_grad_norm / norm)
            self._update(lr)
        self._forget_gradient()
        return OptimStats(grad_norm=norms[0], lr=lr, skipped=skipped)

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps taken so far."""

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All that a resume needs beside `steps`: for each of `TABLES` a tensor for each parameter name."""
        return {table: self._views[table] for table in self.TABLES}

    def restore(self, tables: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Take over what `tensors` gave. Raises `RunError` where it belongs to another model.

        Empties `tables` on the way: they may be mapped from files as large as the optimiser itself.
        """
        for table in self.TABLES:
            self._check(tables[table])
        for table in self.TABLES:
            tensors = tables.pop(table)
            for name, view in self._views[table].items():
                view.copy_(tensors.pop(name))
        self._restored(steps)
        self._forget_gradient()

    @abc.abstractmethod
    def _update(self, lr: float) -> None:
        """Step along the gradient."""

    @abc.abstractmethod
    def _restored(self, steps: int) -> None:
        """The tables now hold what they held after `steps` steps."""

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """The part of `flat` that belongs to each parameter, in its shape."""
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        parts = zip(self._parameters.items(), torch.split(flat, sizes), strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in parts}

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Begin with the parameter's value, and collect its gradient whenever a backward pass has made one."""
        weights, gradient = self._views["weights"][name], self._views["gradient"][name]
        weights.copy_(parameter.detach())
        if parameter.dtype == weights.dtype:
            parameter.data = weights
        if parameter.dtype == gradient.dtype:
            parameter.grad = gradient

        owner = weakref.ref(self)  # what a parameter's hook holds, the garbage collector cannot see

        def collect(parameter: Tensor) -> None:
            optimiser = owner()
            if optimiser is not None:
                optimiser._collect(name, parameter)

        parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def _collect(self, name: str, parameter: Tensor) -> None:
        self._has_gradient = True
        gradient = self._views["gradient"][name]
        if parameter.grad is not None and parameter.dtype != gradient.dtype:
            gradient.add_(parameter.grad)
            parameter.grad = None

    def _forget_gradient(self) -> None:
        self._flat["gradient"].zero_()
        self._has_gradient = False

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        odd = sorted(self._parameters.keys() ^ tensors.keys())
        if odd:
            settings = "with or without a critic" if odd[0].startswith("value_head.") else "of other LoRA settings"
            raise RunError(f"the checkpoint is of another model or {settings}: {odd[0]} is in one only.")
        for name, parameter in self._parameters.items():
            if tensors[name].shape != parameter.shape:
                found, wanted = tuple(tensors[name].shape), tuple(parameter.shape)
                raise RunError(f"the checkpoint is of another model: its {name} has shape {found}, not {wanted}.")
            if tensors[name].dtype != self.dtype:
                kinds = f"{tensors[name].dtype}, this run {self.dtype}".replace("torch.", "")
                raise RunError(f"the checkpoint was written under another train.precision: it holds {kinds}.")


class MasterAdamW(FlatAdamW):
    """Float32 masters of parameters that compute in a narrower type.

    A step of 2e-5 is lost in bfloat16, whose numbers near 0.1 lie 5e-4 apart. So the optimiser keeps each trained
    parameter and its moments in float32, and writes the rounded weights back once a step. What the model computes with
    is then bit for bit what is published, and no cast is left in the forward pass. Parameters that are float32 already
    are their own masters.
    """

    dtype = torch.float32

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: AdamSettings,
        value_head: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(parameters, settings, value_head)
        groups: list[dict[str, object]] = []
        for group in self._groups:
            master = nn.Parameter(self._flat["weights"][group.span])
            master.grad = self._flat["gradient"][group.span]
            groups.append({"params": [master], "weight_decay": group.weight_decay})
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
        self._take_step_count(0)

    @property
    def steps(self) -> int:
        return int(next(iter(self._adamw.state.values()))["step"])

    def _update(self, lr: float) -> None:
        for group, settings in zip(self._groups, self._adamw.param_groups, strict=True):
            settings["lr"] = lr * group.lr_ratio
        self._adamw.step()
        self._write_back()

    def _restored(self, steps: int) -> None:
        self._take_step_count(steps)
        self._write_back()

    def _take_step_count(self, steps: int) -> None:
        """Point AdamW's state at the flat moments, as if it had taken `steps` steps."""
        for group, settings in zip(self._groups, self._adamw.param_groups, strict=True):
            (master,) = settings["params"]
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                "exp_avg": self._flat["exp_avg"][group.span],
                "exp_avg_sq": self._flat["exp_avg_sq"][group.span],
            }

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.dtype != torch.float32:
                    parameter.copy_(self._views["weights"][name])
