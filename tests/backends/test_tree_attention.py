from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outrider.backends import tree_attention
from outrider.backends.packing import pack
from outrider.backends.tree_attention import BLOCK, TreeAttention, TreePlans


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


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("most", [1 << 18, 2000])
def test_outputs_and_gradients_equal_attention_row_by_row(monkeypatch, share, window, most):
    monkeypatch.setattr(tree_attention, "TILE_SCORES", {"cpu": most})
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 40)
    rows = [np.concatenate([prompt[: rng.integers(0, 40)], rng.integers(0, 9, rng.integers(1, 30))]) for _ in range(9)]
    rows.append(rng.integers(0, 9, 2 * BLOCK + 10))  # longer than a block
    (made,) = pack([row.astype(np.int32) for row in rows], token_budget=10_000, share_prefixes=share)
    torch.manual_seed(0)
    inputs = [
        torch.randn(made.size, *shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 8), (2, 8), (2, 5))
    ]
    plan = TreePlans(made.chains, torch.device("cpu")).plan(window)
    out = TreeAttention.apply(*(item.transpose(0, 1) for item in inputs), plan, 0.3)
    expected = row_by_row(*inputs, made.paths, window)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    # Key gradients are summed in float32.
    for one, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
