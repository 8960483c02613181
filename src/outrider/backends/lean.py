"""RMS norm and gated MLP that remember less between the forward and the backward pass.

As written in transformers, a layer of a Llama-like model keeps about 37 kB a token in bfloat16 (hidden size 576):
float32 copies inside the norms, and each product inside the MLP. Computing them anew from what is kept anyway costs
little and leaves 14 kB. The values are those of the originals, operation by operation.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def slim(module: nn.Module) -> None:
    """Give the norms and MLPs inside `module` that are of the usual kind the forward passes below."""
    for part in module.modules():
        kind = type(part).__name__
        if kind.endswith("RMSNorm") and hasattr(part, "variance_epsilon") and hasattr(part, "weight"):
            part.forward = MethodType(_norm_forward, part)
        elif kind.endswith("MLP") and _is_swiglu(part):
            part.forward = MethodType(_mlp_forward, part)


def unslim(module: nn.Module) -> None:
    """Undo `slim`."""
    for part in module.modules():
        if getattr(part.__dict__.get("forward"), "__func__", None) in (_norm_forward, _mlp_forward):
            del part.__dict__["forward"]


def _is_swiglu(part: nn.Module) -> bool:
    names = {name for name, _ in part.named_children()}
    return names == {"gate_proj", "up_proj", "down_proj", "act_fn"} and "SiLU" in type(part.act_fn).__name__


def _norm_forward(self: Any, hidden_states: Tensor) -> Any:
    return _RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]


def _mlp_forward(self: Any, x: Tensor) -> Any:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if type(down) is nn.Linear and getattr(down, "bias", None) is None:
        return _SwigluDown.apply(gate, up, down.weight)  # type: ignore[no-untyped-call]
    return down(F.silu(gate) * up)  # there is an adapter around it


class _RmsNorm(torch.autograd.Function):
    """``weight * x / rms(x)``, with the division in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return weight * (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        (grad,) = grads
        normed = x.float() * inverse
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        mean = (product @ weight.float() / x.shape[-1]).unsqueeze(-1)
        grad_x = normed.mul_(-mean).addcmul_(grad.float(), weight.float()).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


class _SwigluDown(torch.autograd.Function):
    """``(silu(gate) * up) @ weight.T``, of which only `gate` and `up` are kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        (grad,) = grads
        active = F.silu(gate)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = grad.flatten(0, -2).T @ (active * up).flatten(0, -2)
        grad_product = grad @ weight
        grad_up = active.mul_(grad_product)
        grad_gate = torch.ops.aten.silu_backward(grad_product.mul_(up), gate)
        return grad_gate, grad_up, grad_weight
