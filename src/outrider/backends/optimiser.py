"""AdamW over float32 master weights of parameters that compute in a narrower type.

A step of 2e-5 is lost in bfloat16, whose numbers near 0.1 lie 5e-4 apart. So the optimiser keeps each trained
parameter, its gradient and its moments in float32, and writes the rounded weights back once a step. What the model
computes with is then bit for bit what is published, and no cast is left in the forward pass.

Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from outrider.errors import RunError
from outrider.protocols import OptimStats


class MasterAdamW:
    """Holds the masters of `parameters`, by name, and gathers their gradients as micro-batches go by."""

    TABLES = ("weights", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._parameters = dict(parameters)
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._max_grad_norm = max_grad_norm
        matrices = [master for master in self._masters.values() if master.ndim >= 2]
        vectors = [master for master in self._masters.values() if master.ndim < 2]  # gains and biases: no decay
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=True,
        )
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_collector(master))  # type: ignore[no-untyped-call]

    def step(self, lr: float) -> OptimStats:
        """Clip to `max_grad_norm`, step, zero the gradient. Without a gradient, or with one not finite, do nothing."""
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        skipped = not gradients or not torch.isfinite(torch.tensor(norm)).item()
        if not skipped:
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._max_grad_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
        self._adamw.zero_grad(set_to_none=True)
        return OptimStats(grad_norm=norm, lr=lr, skipped=skipped)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All that a resume needs, as three tables by parameter name; moments are missing before the first step."""
        tables: dict[str, dict[str, Tensor]] = {table: {} for table in self.TABLES}
        for name, master in self._masters.items():
            tables["weights"][name] = master.detach()
            for moment in self.TABLES[1:]:
                if master in self._adamw.state:
                    tables[moment][name] = self._adamw.state[master][moment]
        return tables

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        counts = [int(state["step"]) for state in self._adamw.state.values() if "step" in state]
        return max(counts, default=0)

    def restore(self, tables: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Take over what `tensors` gave. Raises `RunError` where it belongs to another model."""
        self._check(tables["weights"])
        self._adamw.state.clear()
        self._adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tables["weights"][name])
                if name in tables["exp_avg"]:
                    self._adamw.state[master] = {
                        "step": torch.tensor(float(steps)),
                        "exp_avg": torch.empty_like(master).copy_(tables["exp_avg"][name]),
                        "exp_avg_sq": torch.empty_like(master).copy_(tables["exp_avg_sq"][name]),
                    }
        self._write_back()

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        odd = sorted(self._masters.keys() ^ weights.keys())
        if odd:
            raise RunError(f"the checkpoint is of another model or of other LoRA settings: {odd[0]} is in one only.")
        for name, master in self._masters.items():
            if weights[name].shape != master.shape:
                raise RunError(f"the checkpoint's {name} has shape {tuple(weights[name].shape)}, not {master.shape}.")

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def _collector(master: nn.Parameter) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return collect
