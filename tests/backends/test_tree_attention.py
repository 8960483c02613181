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


def test_in_bfloat16_a_prefix_of_many_rows_has_a_gradient_as_exact_as_rows_alone():
    """...but for one rounding. The gradient of a key is a sum over 200 rows, which add up rather than cancel; one key
    draws most of the attention."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 900, 150)
    # Each row goes on with an id of its own, so that nothing but the prompt is shared.
    rows = [np.concatenate([prompt, [1000 + row], rng.integers(0, 900, 60)]).astype(np.int32) for row in range(200)]
    (shared,), (alone,) = (pack(rows, token_budget=100_000, share_prefixes=share) for share in (True, False))
    torch.manual_seed(0)
    table = [torch.randn(1300, heads, 16) for heads in (4, 2, 2, 4)]
    sink = F.normalize(torch.randn(16), dim=0)
    table[0] += 4 * sink
    table[1][prompt[0]] = 4 * sink
    table[3].abs_()

    def gradients(made, dtype):
        """Of queries, keys and values, summed over the copies of a node of `shared`."""
        ids = torch.from_numpy(np.concatenate(made.token_ids)).long()
        *inputs, weight = (item[ids].bfloat16().to(dtype) for item in table)
        # What comes after the prompt is trained, once in either pack.
        weight[torch.from_numpy(np.concatenate(made.positions)) < len(prompt)] = 0
        inputs = [item.requires_grad_() for item in inputs]
        plan = TreePlans(made.chains, torch.device("cpu")).plan(None)
        out = TreeAttention.apply(*(item.transpose(0, 1) for item in inputs), plan, 0.25)
        found = torch.autograd.grad((out * weight).sum(), inputs)
        place = torch.zeros(made.size, dtype=torch.long)
        home = dict(zip(shared.rows, shared.paths, strict=True))
        for row, path in zip(made.rows, made.paths, strict=True):
            place[path] = torch.from_numpy(home[row])
        return [torch.zeros(shared.size, *g.shape[1:]).double().index_add_(0, place, g.double()) for g in found]

    exact = gradients(shared, torch.float64)
    together, apart = gradients(shared, torch.bfloat16), gradients(alone, torch.bfloat16)
    for one, other, truth in zip(together, apart, exact, strict=True):
        rounding = 2**-9 * truth.norm()  # of a sum that is handed on in bfloat16, where rows alone hand on many
        assert (one - truth).norm() < 1.2 * (other - truth).norm() + rounding
