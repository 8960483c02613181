"""AdamW over float32 master weights of parameters that compute in a narrower type.

A step of 2e-5 is lost in bfloat16, whose numbers near 0.1 lie 5e-4 apart. So the optimiser keeps each trained
parameter, its gradient and its moments in float32, and writes the rounded weights back once a step. What the model
computes with is then bit for bit what is published, and no cast is left in the forward pass.

Each of the four lies in one flat tensor, allocated once: hundreds of small ones, made and freed between activations,
leave holes of half a gigabyte in the heap.

Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outrider.errors import RunError
from outrider.protocols import OptimStats


class MasterAdamW:
    """Holds the masters of `parameters`, by name, and gathers their gradients as micro-batches go by."""

    TABLES = ("weights", "exp_avg", "exp_avg_sq")
    """What a checkpoint holds."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        # Matrices first: gains and biases come last and are not decayed.
        self._parameters = dict(sorted(parameters.items(), key=lambda item: item[1].ndim < 2))
        self._max_grad_norm = max_grad_norm
        self._has_gradient = False
        total = sum(parameter.numel() for parameter in self._parameters.values())
        device = next(iter(self._parameters.values())).device
        self._flat = {name: torch.zeros(total, device=device) for name in (*self.TABLES, "gradient")}
        self._views = {name: self._split(flat) for name, flat in self._flat.items()}
        self._adamw = torch.optim.AdamW(self._groups(weight_decay), lr=0.0, betas=betas, eps=eps, fused=True)
        self._take_step_count(0)
        for name, parameter in self._parameters.items():
            self._adopt(name, parameter)

    def step(self, lr: float) -> OptimStats:
        """Clip to `max_grad_norm`, step, zero the gradient. Without a gradient, or with one not finite, do nothing."""
        gradient = self._flat["gradient"]
        norm = float(torch.linalg.vector_norm(gradient))
        skipped = not self._has_gradient or not math.isfinite(norm)
        if not skipped:
            if norm > self._max_grad_norm:
                gradient.mul_(self._max_grad_norm / norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
        self._forget_gradient()
        return OptimStats(grad_norm=norm, lr=lr, skipped=skipped)

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return int(next(iter(self._adamw.state.values()))["step"])

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All that a resume needs beside `steps`: for each of `TABLES` a float32 tensor for each parameter name."""
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
        self._take_step_count(steps)
        self._forget_gradient()
        self._write_back()

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """The part of `flat` that belongs to each parameter, in its shape."""
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        parts = zip(self._parameters.items(), torch.split(flat, sizes), strict=True)
        return {name: part.view(parameter.shape) for (name, parameter), part in parts}

    def _groups(self, weight_decay: float) -> list[dict[str, object]]:
        """The flat masters as two parameter groups, decayed and not."""
        matrices = sum(parameter.numel() for parameter in self._parameters.values() if parameter.ndim >= 2)
        groups: list[dict[str, object]] = []
        for span, decay in ((slice(0, matrices), weight_decay), (slice(matrices, None), 0.0)):
            master = nn.Parameter(self._flat["weights"][span])
            if master.numel():
                master.grad = self._flat["gradient"][span]
                groups.append({"params": [master], "weight_decay": decay, "span": span})
        return groups

    def _take_step_count(self, steps: int) -> None:
        """Point AdamW's state at the flat moments, as if it had taken `steps` steps."""
        for group in self._adamw.param_groups:
            (master,) = group["params"]
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                "exp_avg": self._flat["exp_avg"][group["span"]],
                "exp_avg_sq": self._flat["exp_avg_sq"][group["span"]],
            }

    def _adopt(self, name: str, parameter: nn.Parameter) -> None:
        """Begin with the parameter's value, and collect its gradient whenever a backward pass has made one."""
        master, gradient = self._views["weights"][name], self._views["gradient"][name]
        master.copy_(parameter.detach())
        if parameter.dtype == master.dtype:
            parameter.data, parameter.grad = master, gradient

        def collect(parameter: Tensor) -> None:
            self._has_gradient = True
            if parameter.grad is not None and parameter.dtype != gradient.dtype:
                gradient.add_(parameter.grad)
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]

    def _forget_gradient(self) -> None:
        self._flat["gradient"].zero_()
        self._has_gradient = False

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        odd = sorted(self._parameters.keys() ^ tensors.keys())
        if odd:
            raise RunError(f"the checkpoint is of another model or of other LoRA settings: {odd[0]} is in one only.")
        for name, parameter in self._parameters.items():
            if tensors[name].shape != parameter.shape:
                found, wanted = tuple(tensors[name].shape), tuple(parameter.shape)
                raise RunError(f"the checkpoint is of another model: its {name} has shape {found}, not {wanted}.")

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.dtype != torch.float32:
                    parameter.copy_(self._views["weights"][name])
