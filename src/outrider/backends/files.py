"""Files of tensors and the folders they lie in, written so that a reader sees all of it or nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from outrider.errors import SetupError

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Endings of files that hold weights, which are not copied along."""

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `target` at the end. An error leaves `target` as it was.

    Files are flushed to the disk before the folder gets its name. Raises `SetupError` where the disk does not take it.
    """
    building = target.with_name(f".{target.name}.{os.getpid()}.new")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        for leftover in (building, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        building.mkdir(parents=True)
        yield building
        for path in sorted(building.rglob("*")):
            if path.is_file():
                _flush(path)
        _flush(building)
        if target.exists():
            target.rename(replaced)
        building.rename(target)
        _flush(target.parent)
    except OSError as error:
        raise SetupError(f"cannot write {target}: {error.strerror or error}.") from error
    finally:
        for leftover in (building, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, one tensor after the other, without a second copy of any of them in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def open_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped from the disk and read when they are used."""
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def write_hugging_face(folder: Path, weights: Mapping[str, Tensor], module: Any, *, start: Path) -> None:
    """Fill `folder` so that ``from_pretrained`` loads it: `weights` in bfloat16, the rest as in `start`."""
    state = remove_tied_weights_from_state_dict(dict(weights), module)
    state = revert_weight_conversion(module, state)
    narrow = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()}
    write_tensors(folder / "model.safetensors", narrow)
    for path in start.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHT_FILES):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((start / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
