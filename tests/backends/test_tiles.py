"""Tiles in bfloat16."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from outrider.backends.packing import pack
from outrider.backends.tiles import TiledTree


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
        tree = TiledTree(made.chains, torch.device("cpu"))
        out = tree.attend(*(item.transpose(0, 1) for item in inputs), 0.25, None)
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
