"""The sampler against its definition."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engines.embedded.sampling import Sampling, generator, sample, shape_logits


def rule(**values):
    return Sampling(max_tokens=1, **values)


def reference(logits: np.ndarray, row: Sampling) -> np.ndarray:
    """Log-probs by the definition, token by token, in float64."""
    scaled = logits.astype(np.float64) / (row.temperature or 1.0)
    order = np.argsort(-scaled, kind="stable")
    kept = order[: row.top_k] if row.top_k and row.temperature else order
    p = np.exp(scaled[kept] - scaled.max())
    p /= p.sum()
    if row.top_p < 1.0 and row.temperature:
        before = np.cumsum(p) - p
        kept = kept[before < row.top_p]
    out = np.full(len(logits), -np.inf)
    total = np.log(np.exp(scaled[kept] - scaled.max()).sum()) + scaled.max()
    out[kept] = scaled[kept] - total
    return out


def test_R05_two_logits_at_half_temperature():
    """Logits [2, 0] at T = 0.5, token 1: -4.0181; not the raw -2.1269, nor that divided by T."""
    draws = sample(torch.tensor([[2.0, 0.0]]), [rule(temperature=0.5)], [0.9999])
    assert draws.ids == [1]
    assert draws.logprobs[0] == pytest.approx(-4.0181, abs=1e-4)


def test_greedy_takes_the_best_and_reports_temperature_one():
    draws = sample(torch.tensor([[2.0, 0.0, 1.0]]), [rule(temperature=0, top_p=0.1, top_k=1)], [0.99])
    assert draws.ids == [0]
    assert draws.logprobs[0] == pytest.approx(2 - math.log(math.exp(2) + 1 + math.e), abs=1e-6)


ROWS = st.builds(
    rule,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 700, 5000]),
    top_logprobs=st.integers(0, 4),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), st.sampled_from([5, 600, 1500]), st.integers(0, 2**31), st.data())
def test_ids_and_logprobs_follow_the_definition(rows, vocabulary, seed, data):
    source = np.random.default_rng(seed)
    width = data.draw(st.sampled_from([0.3, 3.0]))  # the flat one has nuclei wider than the candidates looked at first
    logits = source.normal(0, width, (len(rows), vocabulary)).astype(np.float32)
    uniforms = source.random(len(rows)).tolist()
    draws = sample(torch.from_numpy(logits.copy()), rows, uniforms)
    for i, row in enumerate(rows):
        expected = reference(logits[i], row)
        assert draws.logprobs[i] == pytest.approx(expected[draws.ids[i]], abs=2e-4)
        if row.temperature == 0:
            assert draws.ids[i] == int(logits[i].argmax())
        assert len(draws.tops[i]) == row.top_logprobs
        best = np.sort(expected)[::-1][: row.top_logprobs]
        np.testing.assert_allclose([value for _, value in draws.tops[i]], best, atol=2e-4)


@pytest.mark.parametrize("row", [rule(), rule(temperature=0.7, top_p=0.8), rule(top_k=5)])
def test_evenly_spread_numbers_give_each_token_its_share(row):
    """Inverse transform sampling: a grid of uniform numbers hits each token in proportion, to one in the grid."""
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)) * 2
    grid = 4000
    draws = sample(logits.repeat(grid, 1), [row] * grid, [(i + 0.5) / grid for i in range(grid)])
    counts = Counter(draws.ids)
    probabilities = np.exp(reference(logits[0].numpy(), row))
    for token, probability in enumerate(probabilities):
        assert abs(counts[token] - grid * probability) <= 1.1, token


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 400:600] = 0.0
    token = sample(logits, [rule()], [uniform]).ids[0]
    assert token == (400 if uniform == 0 else 599)


def test_a_row_that_is_not_finite_shows_and_spoils_no_other():
    logits = torch.zeros(3, 8)
    logits[1, 3] = torch.nan
    draws = sample(logits, [rule(), rule(), rule(temperature=0)], [0.1, 0.1, 0.1])
    assert math.isnan(draws.logprobs[1])
    assert [math.isfinite(draws.logprobs[i]) for i in (0, 2)] == [True, True]


def test_truncation_of_one_row_leaves_the_others_whole():
    logits = torch.randn(2, 600)
    shaped = shape_logits(logits.clone(), [rule(), rule(top_k=2)])
    assert torch.equal(shaped[0], logits[0])
    assert int(torch.isfinite(shaped[1]).sum()) == 2


def test_numbers_depend_on_seed_and_choice_alone():
    first, again, choice, seed = generator(1, 0), generator(1, 0), generator(1, 1), generator(2, 0)
    numbers = [source.random() for source in (first, again, choice, seed)]
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
