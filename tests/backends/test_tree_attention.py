"""Each way to attend to a trie gives what attention row by row gives; flex attention runs uncompiled here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from row_by_row import SPEC, backend, by_transformers, gradients, with_reference
from torch.nn.attention import flex_attention

from outrider.backends import tiles, tree_attention
from outrider.backends.flex import FlexTree
from outrider.backends.packing import pack
from outrider.backends.tiles import BLOCK, TiledTree
from outrider.errors import ConfigError
from outrider.protocols import LossSpec


@pytest.fixture
def flex_on_cpu(monkeypatch) -> None:
    """Run flex attention's operator as it is. PyTorch refuses its backward pass on a CPU, though it has one."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def row_by_row(q, k, v, paths, window):
    """Each node's output from the first row that holds it, by the textbook."""
    out = {}
    for path in paths:
        nodes = torch.from_numpy(path)
        length = len(path)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        result = F.scaled_dot_product_attention(
            *(item[nodes].transpose(0, 1)[None] for item in (q, k, v)), attn_mask=seen, enable_gqa=True, scale=0.3
        )[0].transpose(0, 1)
        for node, value in zip(path.tolist(), result, strict=True):
            out.setdefault(node, value)
    return torch.stack([out[node] for node in range(len(q))])


def random_pack(share):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 40)
    rows = [np.concatenate([prompt[: rng.integers(0, 40)], rng.integers(0, 9, rng.integers(1, 30))]) for _ in range(9)]
    rows.append(rng.integers(0, 9, 2 * BLOCK + 10))  # longer than a block
    (made,) = pack([row.astype(np.int32) for row in rows], token_budget=10_000, share_prefixes=share)
    return made


def compare(tree, made, window, dtype, sizes):
    """Outputs, and gradients of queries, keys and values, against those row by row."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(made.size, heads, size, dtype=dtype, requires_grad=True)
        for heads, size in zip((6, 2, 2), sizes, strict=True)
    ]
    out = tree.attend(*(item.transpose(0, 1) for item in inputs), 0.3, window)
    expected = row_by_row(*inputs, made.paths, window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    # Key gradients are summed in float32.
    for one, other in zip(found, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("most", [1 << 18, 2000])
def test_tiles_equal_attention_row_by_row(monkeypatch, share, window, most):
    monkeypatch.setattr(tiles, "TILE_SCORES", {"cpu": most})
    made = random_pack(share)
    compare(TiledTree(made.chains, torch.device("cpu")), made, window, torch.float64, (8, 8, 5))


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_flex_attention_equals_attention_row_by_row(share, window):
    made = random_pack(share)
    compare(FlexTree(made.chains, torch.device("cpu")), made, window, torch.float64, (16, 16, 16))


@pytest.mark.parametrize("share", [True, False])
def test_the_mask_of_flex_attention_lets_each_node_see_its_path_and_skips_empty_blocks(share):
    made = random_pack(share)
    tree = FlexTree(made.chains, torch.device("cpu"))
    node = torch.arange(made.size)
    for window in (None, 7):
        seen = tree.mask(window)(None, None, node[:, None], node)
        for path in made.paths:
            reach = len(path) if window is None else window
            for place, query in enumerate(path):
                below = path[max(0, place + 1 - reach) : place + 1]
                assert np.flatnonzero(seen[query].numpy()).tolist() == sorted(below.tolist())
    torch.testing.assert_close(tree.block_mask(None).to_dense().bool()[0, 0], blocks_of(tree.mask(None), made.size))


def blocks_of(mask, size):
    """Which blocks of 128 x 128 have anything in them."""
    node = torch.arange(size)
    padded = torch.zeros(-(-size // 128) * 128, -(-size // 128) * 128, dtype=torch.bool)
    padded[:size, :size] = mask(None, None, node[:, None], node)
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)


@pytest.mark.usefixtures("flex_on_cpu")
def test_a_backend_on_flex_attention_equals_transformers_row_by_row(tiny, monkeypatch, branching_rows):
    monkeypatch.setattr(tree_attention, "ways", lambda name, device: [FlexTree])
    rows = with_reference(branching_rows(temperatures=(1.0, 0.7)))
    made = backend(tiny)
    stats = made.forward_backward(rows, SPEC)
    loss, expected, _ = by_transformers(tiny, rows, SPEC)
    assert stats.loss == pytest.approx(loss, abs=1e-5)
    assert stats.tokens_computed < 0.8 * sum(len(row.sample.token_ids) for row in rows)
    for name, gradient in gradients(made).items():
        scale = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5 * scale)


def test_the_device_decides_unless_a_name_is_given():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert tree_attention.ways("auto", cpu) == tree_attention.ways("tiles", cpu) == [TiledTree]
    assert tree_attention.ways("auto", gpu) == [FlexTree, TiledTree]
    assert tree_attention.ways("flex", gpu) == [FlexTree]
    assert tree_attention.ways("tiles", gpu) == [TiledTree]
    with pytest.raises(ConfigError, match=r"train\.attention: there is no 'flash'\. Known: auto, tiles, flex"):
        tree_attention.ways("flash", cpu)
    with pytest.raises(ConfigError, match="no backward pass on a CPU"):
        tree_attention.ways("flex", cpu)


def test_where_the_first_way_fails_the_next_is_tried(tiny, monkeypatch, branching_rows):
    class Broken(TiledTree):
        def attend(self, *arguments):
            raise RuntimeError("no kernel for this device")

    class Wrong(TiledTree):
        def attend(self, *arguments):
            return super().attend(*arguments) * 1.5

    monkeypatch.setattr(tree_attention, "ways", lambda name, device: [Broken, Wrong, TiledTree])
    made = backend(tiny)  # a warning would be an error
    assert made._model.packed
    monkeypatch.setattr(tree_attention, "ways", lambda name, device: [Wrong, Broken])
    with pytest.warns(UserWarning, match="no kernel for this device.*trained row by row"):
        other = backend(tiny)
    rows = branching_rows()
    one, two = (each.forward_backward(rows, LossSpec()) for each in (made, other))
    assert one.loss == pytest.approx(two.loss, abs=1e-5)
    assert one.tokens_computed < two.tokens_computed
