"""Read and check the weights of a Hugging Face folder before anything that serves is touched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.errors import ConfigError

NAMES_SHOWN = 3


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that its index names. Raises `ConfigError`."""
    if not folder.is_dir():
        raise ConfigError(f"path: there is no folder {str(folder)!r}.")
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors.update(load_file(folder / name))
    except FileNotFoundError as error:
        raise ConfigError(f"path: {str(folder)!r} has no {Path(error.filename or names[0]).name}.") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"path: the weights in {str(folder)!r} cannot be read: {error}") from error
    return tensors


def check_tensors(found: Mapping[str, Tensor], expected: Mapping[str, torch.Size], folder: Path) -> None:
    """Raise `ConfigError` unless names and shapes are the expected ones and every number is finite."""
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    for what, names in (("lacks", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
            raise ConfigError(f"path: {str(folder)!r} {what} {len(names)} of the model's tensors: {shown}.")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ConfigError(
                f"path: {name} in {str(folder)!r} has shape {tuple(found[name].shape)}, the model's is {tuple(shape)}."
            )
    check_finite(found, folder)


def check_finite(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise `ConfigError` naming the first tensor that holds an infinity or NaN."""
    for name, tensor in tensors.items():
        # A sum is finite only if all its terms are, and far cheaper than a mask of them.
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
            raise ConfigError(f"path: {name} in {str(folder)!r} holds numbers that are not finite.")
