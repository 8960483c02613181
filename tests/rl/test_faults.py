"""Well-known faults of the field, each as a test that fails where it is made. From calls to rows, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.calls import call, choice
from outrider.rl.batch import Batch, make_batch
from outrider.trajectory import build
from outrider.types import Call, Sample

END = 99  # the token that ends a turn


def samples(rollout: str, calls: list[Call], group: str = "g") -> list[Sample]:
    return list(build(calls).samples(rollout_id=rollout, group_id=group).samples)


def batch(rollouts: dict[str, list[Sample]], rewards: dict[str, float | None], **options) -> Batch:
    rows = [sample for made in rollouts.values() for sample in made]
    return make_batch(rows, rewards, dict.fromkeys(rewards, "g"), **options)


def advantage(made: Batch, rollout: str) -> set[float]:
    rows = [row for row in made.rows if row.sample.rollout_id == rollout]
    return {float(value) for row in rows for value in row.advantages[row.sample.loss_mask]}


def weight(made: Batch, rollout: str) -> float:
    return float(sum(row.weights.sum() for row in made.rows if row.sample.rollout_id == rollout))


def compacted(prefix: int) -> list[Call]:
    """R01: two turns, a summary asked for without tools, a fresh start after it, and a sub-agent in between."""
    system, bare = [1, 2, prefix], [1, 3, prefix]
    return [
        call([*system, 10], [20, END], seq=1),
        call([7, 7, prefix], [50, 51, END], seq=2),  # the sub-agent
        call([*system, 10, 20, END, 11], [21, 22, END], seq=3),
        call([7, 7, prefix, 50, 51, END, 52], [53, END], seq=4),
        call([*bare, 10, 20, END, 11, 21, 22, END, 12], [30, END], seq=5),  # the summary
        call([*system, 30, 13], [23, 24, 25, END], seq=6),
    ]


def test_R01_a_compacted_rollout_has_one_advantage_and_the_weight_of_one_rollout():
    rollouts = {
        "long": samples("long", compacted(5)),
        "short": samples("short", [call([1, 2, 6, 10], [40, END], seq=1)]),
    }
    assert len(rollouts["long"]) == 4  # two turns, the summary, the fresh start; the sub-agent's two calls
    made = batch(rollouts, {"long": 1.0, "short": 0.0}, estimator="dr_grpo")
    assert advantage(made, "long") == {0.5}
    assert advantage(made, "short") == {-0.5}
    assert weight(made, "long") == pytest.approx(weight(made, "short"))
    assert made.tokens == 16 + 2  # each sampled token once


def test_a_baseline_counted_by_row_would_follow_the_number_of_rows():
    """Four rows of reward 1 and one of reward 0 have a mean of 0.8 by row, and of 0.5 by rollout."""
    rollouts = {
        "long": samples("long", compacted(5)),
        "short": samples("short", [call([1, 2, 6, 10], [40, END], seq=1)]),
    }
    assert sum(len(rows) for rows in rollouts.values()) == 5
    for estimator, expected in (("dr_grpo", 0.5), ("rloo", 1.0), ("grpo", 0.5 / (np.sqrt(0.5) + 1e-6))):
        made = batch(rollouts, {"long": 1.0, "short": 0.0}, estimator=estimator)
        assert list(advantage(made, "long")) == pytest.approx([expected], rel=1e-5)
        assert list(advantage(made, "short")) == pytest.approx([-expected], rel=1e-5)


def test_no_end_is_invented_where_the_answer_was_cut_off():
    """A synthetic end-of-turn would be trained though nobody sampled it; the length limit said stop, not the model."""
    finished = samples("r", [call([1, 2], [20, 21, END], seq=1)])[0]
    cut_off = samples("r", [call([1, 2], choice([20, 21], finish="length"), seq=1)])[0]
    assert finished.token_ids.tolist() == [1, 2, 20, 21, END]
    assert cut_off.token_ids.tolist() == [1, 2, 20, 21]
    assert cut_off.truncated
    assert not finished.truncated
    made = batch({"r": [cut_off], "s": samples("s", [call([1, 2], [9], seq=1)])}, {"r": 1.0, "s": 0.0})
    assert made.tokens == 3


def test_an_end_that_the_template_adds_is_context():
    """After a cut-off answer the harness goes on, and the next prompt holds an end of turn: it was never sampled."""
    calls = [call([1, 2], choice([20, 21], finish="length"), seq=1), call([1, 2, 20, 21, END, 3], [22, END], seq=2)]
    (sample,) = samples("r", calls)
    assert sample.token_ids[sample.loss_mask].tolist() == [20, 21, 22, END]
    assert not sample.loss_mask[4]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline"])
def test_R03_siblings_that_cannot_be_trained_move_no_baseline(estimator):
    plain = {name: samples(name, [call([1, 2], [int(name), END], seq=1)]) for name in ("3", "4", "5")}
    rewards: dict[str, float | None] = {"3": 1.0, "4": 3.0, "5": 2.0}
    alone = batch(plain, rewards, estimator=estimator)
    broken = {"mute": samples("mute", []), "unscored": samples("unscored", [call([1, 2], [8, END], seq=1)])}
    beside = batch(plain | broken, rewards | {"mute": 100.0, "unscored": None}, estimator=estimator)
    assert beside.advantages == alone.advantages
    assert [row.weights.tolist() for row in beside.rows] == [row.weights.tolist() for row in alone.rows]
    assert sum(beside.excluded.values()) == 2
    failed = batch(plain, rewards | {"4": 0.0}, estimator=estimator)  # a policy failure is no broken rollout
    assert failed.advantages["4"] < 0
    assert set(failed.advantages) == set(alone.advantages)


def test_R05_rows_keep_the_temperature_they_were_sampled_at():
    rows = samples("r", [call([1, 2], [20, END], seq=1, temperature=0.5), call([1, 3], [21, END], seq=2)])
    assert sorted(row.temperature for row in rows) == [0.5, 1.0]
    made = batch({"r": rows, "s": samples("s", [call([1, 2], [9], seq=1)])}, {"r": 1.0, "s": 0.0})
    by_temperature = {row.sample.temperature: row for row in made.rows if row.sample.rollout_id == "r"}
    for row in by_temperature.values():  # log-probs are as the engine said them, whatever the temperature
        np.testing.assert_array_equal(row.sample.logprobs[row.sample.loss_mask], np.array([-0.25, -0.26], np.float32))


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (0.1, 0.1), (None, 1.0), (None, None)])
def test_R10_a_group_without_a_comparison_trains_nothing(rewards):
    rollouts = {name: samples(name, [call([1, 2], [int(name), END], seq=1)]) for name in ("3", "4")}
    made = batch(rollouts, dict(zip(rollouts, rewards, strict=True)))
    assert made.rows == ()
    assert made.tokens == 0
    assert sum(made.excluded.values()) == 2
