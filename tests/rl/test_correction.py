from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import BatchError, ConfigError
from outrider.rl.correction import Bounds, correct
from outrider.rl.kl_reward import kl_penalties
from outrider.rl.mismatch import alarm
from outrider.types import Row, Sample


def row(rollout: str, ratios, advantage=2.0) -> Row:
    """One token of context, then a trained token for each ratio of old to behaviour."""
    mask = np.array([False, *[True] * len(ratios)])
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    sample = Sample(
        rollout_id=rollout,
        group_id="g",
        attempt_id="a",
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, 0, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int32),
    )
    return Row(
        sample=sample,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        weights=np.where(mask, 0.1, 0).astype(np.float32),
        old_logprobs=logprobs + np.log(np.array([1.0, *ratios], dtype=np.float32)),
    )


def factors(made, index=0) -> list[float]:
    item = made.rows[index]
    return (item.advantages[item.sample.loss_mask] / 2.0).tolist()


def test_each_method_by_hand():
    ratios = [0.25, 1.0, 4.0, 8.0]
    assert factors(correct([row("r", ratios)], ["token_tis"])) == pytest.approx([0.25, 1, 2, 2])
    assert factors(correct([row("r", ratios)], ["sequence_tis"])) == pytest.approx([2] * 4)  # the product is 8
    assert factors(correct([row("r", [0.5, 0.5])], ["sequence_tis"])) == pytest.approx([0.25] * 2)
    assert factors(correct([row("r", ratios)], ["icepop"])) == pytest.approx([0, 1, 4, 0])
    assert factors(correct([row("r", ratios)], ["geometric"])) == pytest.approx([0] * 4)  # the mean ratio is 8 ** 0.25
    assert factors(correct([row("r", [4.0, 0.25])], ["geometric"])) == pytest.approx([1, 1])
    assert factors(correct([row("r", ratios)], [])) == pytest.approx([1] * 4)
    both = correct([row("r", [4.0, 0.25]), row("s", [2.0])], ["geometric", "token_tis"])
    assert factors(both, 0) == pytest.approx([2, 0.25])
    assert factors(both, 1) == pytest.approx([0])


def test_dppo_masks_by_probability_and_only_what_is_pushed_further():
    behaviour = np.exp(-1.0)  # every token of `row`
    far, near = 0.6 / behaviour, 0.4 / behaviour
    for name, limit in (("dppo_tv", 0.15), ("dppo_kl", 0.1)):
        bounds = Bounds(dppo_divergence=limit)
        assert factors(correct([row("r", [far, near, 0.1])], [name], bounds)) == pytest.approx([0, 1, 1]), name
        down = correct([row("r", [far, near, 0.1], advantage=-2.0)], [name], bounds)
        assert factors(down) == pytest.approx([-1, -1, 0]), name
        assert down.excluded == {f"token: importance ratio out of bounds ({name})": 1}


def test_bounds_are_options():
    bounds = Bounds(tis_cap=3, icepop_low=0.1, icepop_high=9, geometric_low=0.5, geometric_high=2)
    ratios = [0.25, 1.0, 4.0, 8.0]
    assert factors(correct([row("r", ratios)], ["token_tis"], bounds)) == pytest.approx([0.25, 1, 3, 3])
    assert factors(correct([row("r", ratios)], ["icepop"], bounds)) == pytest.approx(ratios)
    assert factors(correct([row("r", ratios)], ["geometric"], bounds)) == pytest.approx([1] * 4)


def test_masked_tokens_are_counted_with_their_reason():
    made = correct([row("r", [0.25, 1.0]), row("s", [1.0, 1.0, 1.0])], ["icepop", "geometric"])
    # of the first rollout one token by icepop, the other since the rollout as a whole is off
    assert made.excluded == Counter(
        {
            "token: importance ratio out of bounds (icepop)": 1,
            "token: importance ratio out of bounds (geometric)": 1,
        }
    )
    assert made.mismatch.masked == pytest.approx(2 / 5)
    assert [item.weights.tolist() for item in made.rows] == [
        item.weights.tolist() for item in (row("r", [1, 1]), row("s", [1, 1, 1]))
    ]  # a masked token keeps its place in the normalisation


def test_statistics_are_of_what_came_in():
    ratios = [0.5, 1.0, 3.0]
    before = correct([row("r", ratios)], [])
    for methods in (["token_tis"], ["icepop"], ["geometric"], ["sequence_tis", "geometric"]):
        after = correct([row("r", ratios)], methods).mismatch
        assert replace(after, masked=0.0) == before.mismatch
    w = np.array(ratios)
    assert before.mismatch.weight_mean == pytest.approx(1.5)
    assert before.mismatch.weight_max == pytest.approx(3.0)
    assert before.mismatch.kl == pytest.approx((w - 1 - np.log(w)).mean(), rel=1e-6)
    assert before.mismatch.effective == pytest.approx(4.5**2 / (3 * (0.25 + 1 + 9)))


@given(
    ratios=st.lists(st.floats(0.3, 3), min_size=2, max_size=8),
    cut=st.integers(1, 7),
    methods=st.sampled_from([["token_tis"], ["sequence_tis"], ["icepop"], ["geometric"], ["geometric", "icepop"]]),
)
def test_rows_and_their_order_change_nothing(ratios, cut, methods):
    bounds = Bounds(geometric_low=0.8, geometric_high=1.25)
    cut = min(cut, len(ratios) - 1)
    other = row("other", [1.0, 2.0])
    whole = correct([row("r", ratios), other], methods, bounds)
    parts = correct([row("r", ratios[cut:]), other, row("r", ratios[:cut])], methods, bounds)
    assert factors(parts, 2) + factors(parts, 0) == pytest.approx(factors(whole, 0), rel=1e-5)
    assert factors(parts, 1) == factors(whole, 1)
    assert parts.mismatch.weight_mean == pytest.approx(whole.mismatch.weight_mean)
    assert parts.excluded == whole.excluded


def test_far_apart_is_finite():
    made = correct([row("r", [1e-30, 1.0])], ["sequence_tis"])
    assert all(np.isfinite(factors(made)))
    far = replace(row("r", [1.0, 1.0]), old_logprobs=np.array([0, -900, 400], np.float32))
    made = correct([far], ["token_tis"])
    assert factors(made) == pytest.approx([0, 2], abs=1e-6)
    assert np.isfinite(made.mismatch.kl)


def test_names_and_rows_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"train\.correction.*'tis'.*token_tis"):
        correct([row("r", [1.0])], ["tis"])
    with pytest.raises(ConfigError, match="both multiply"):
        correct([row("r", [1.0])], ["icepop", "token_tis"])
    with pytest.raises(BatchError, match="old_logprobs"):
        correct([replace(row("r", [1.0]), old_logprobs=None)], ["token_tis"])
    assert correct([], ["token_tis"]).rows == ()


def test_the_kl_comes_off_the_reward_at_trained_tokens():
    sample = row("r", [1.0, 1.0]).sample
    old, reference = [np.array([-3, -1, -2], np.float32)], [np.array([0, -1.5, -1], np.float32)]
    assert kl_penalties([sample], old, reference, 0.1)[0].tolist() == pytest.approx([0, 0.05, -0.1])
    assert kl_penalties([sample], old, reference, 0.1, "k2")[0].tolist() == pytest.approx([0, 0.0125, 0.05])


def test_alarm():
    usual = [0.01, 0.012, 0.011]
    assert alarm(usual, 0.5) == ""
    assert "stop_on_mismatch is 0.05" in alarm(usual, 0.5, limit=0.05)
    assert alarm(usual, 0.04, limit=0.05) == ""
    assert "median of the last 3 steps is 0.011" in alarm(usual, 0.06, jump=5)
    assert alarm(usual, 0.05, jump=5) == ""
    assert alarm(usual[:2], 0.5, jump=5) == ""  # too early to say what is usual
    assert alarm([0.01, 0.01, 0.01, 2.0], 0.06, jump=5)  # one odd step is not what is usual: a mean would be
    assert alarm([9.0] * 50 + [0.01] * 16, 1.0, jump=5)  # only the last steps count
    assert alarm(usual, float("nan"), limit=0.05)
    assert alarm(usual, float("nan"), jump=5)
