from __future__ import annotations

import pytest
import safetensors.torch
import torch

from outrider.backends.files import atomic_directory, open_tensors, write_tensors
from outrider.errors import SetupError


def test_tensors_are_read_back_by_ours_and_by_the_library(tmp_path):
    tensors = {
        "a": torch.randn(3, 5).to(torch.bfloat16),
        "b": torch.arange(4),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(4, 2).T,
        "state": torch.get_rng_state(),
    }
    path = tmp_path / "t.safetensors"
    write_tensors(path, tensors)
    for found in (open_tensors(path), safetensors.torch.load_file(path)):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "deep" / "weights"
    with atomic_directory(target) as folder:
        (folder / "one").write_text("1")
        assert not target.exists()
    assert (target / "one").read_text() == "1"

    def interrupted():
        with atomic_directory(target) as folder:
            (folder / "one").write_text("2")
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert (target / "one").read_text() == "1"

    with pytest.raises(SetupError, match=r"cannot write .*weights: No space left"), atomic_directory(target):
        raise OSError(28, "No space left on device")
    assert [path.name for path in target.parent.iterdir()] == ["weights"]
