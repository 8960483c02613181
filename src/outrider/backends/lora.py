"""LoRA through `peft`: low-rank adapters on every linear layer but the vocabulary projection.

Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, arXiv:2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

ADAPTER = "default"


def add_adapters(module: Any, *, rank: int, alpha: float, seed: int) -> None:
    """Freeze `module` and put adapters into it, whose product is 0 at first. `seed` decides the other factor."""
    settings = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    dtype = module.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # the optimiser keeps a float32 master of it


@contextlib.contextmanager
def adapters_off(module: Any, off: bool) -> Iterator[None]:
    """With `off`, the model computes with its starting weights meanwhile."""
    layers = [layer for layer in module.modules() if off and isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged_weights(module: Any) -> dict[str, Tensor]:
    """The state of the model as if it had never had adapters: new tensors, the live ones are not touched."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)}
    merged = {}
    for name, tensor in module.state_dict().items():
        owner, _, attribute = name.rpartition(".base_layer.")
        if owner in layers:
            if attribute == "weight":
                tensor = (tensor.float() + layers[owner].get_delta_weight(ADAPTER).float()).to(tensor.dtype)
            merged[f"{owner}.{attribute}"] = tensor
        elif ".lora_" not in name:
            merged[name] = tensor
    return merged
