"""What a step learns: which log-probs are asked for, what the rows hold, when a mismatch stops the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.config import TrainConfig
from outrider.errors import ConfigError, RunError
from outrider.learn import Learner, check, loss_spec
from outrider.metrics import Timer
from outrider.protocols import LossSpec, OptimStats, StepStats
from outrider.types import Rollout, Sample, Task

STATS = StepStats(
    loss=0.0,
    tokens=1,
    tokens_computed=1,
    ratio_mean=1.0,
    clip_fraction=0.0,
    entropy=0.0,
    kl_behaviour=0.0,
    kl_reference=0.0,
    logprob_diff_mean=0.01,
    logprob_diff_max=0.1,
)


class Recorder:
    """A backend that remembers what it was asked, and an observer that nobody watches."""

    def __init__(self, old: float = -0.5, reference: float = -0.75) -> None:
        self.level = {False: old, True: reference}
        self.asked: list[str] = []
        self.trained: list[tuple] = []
        self.difference = 0.01

    def logprobs(self, samples, *, reference=False):
        self.asked.append("reference" if reference else "old")
        return [np.where(s.loss_mask, self.level[reference], 0).astype(np.float32) for s in samples]

    def values(self, samples):
        self.asked.append("values")
        return [np.where(s.loss_mask, 0.5, 0).astype(np.float32) for s in samples]

    def forward_backward(self, rows, loss):
        self.trained.append((tuple(rows), loss))
        return replace(STATS, logprob_diff_mean=self.difference)

    def optim_step(self, lr):
        self.asked.append("step")
        return OptimStats(grad_norm=1.0, lr=lr)

    def advance(self, rollout=None): ...

    def message(self, text): ...


def sample(rollout: str, calls: int = 2) -> Sample:
    mask = np.array([False, True, True] * calls)
    return Sample(
        rollout_id=rollout,
        group_id="g",
        attempt_id=f"{rollout}.a1",
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        call_index=np.where(mask, np.repeat(np.arange(calls), 3), -1).astype(np.int32),
    )


def rollout(name: str, reward: float | None) -> Rollout:
    return Rollout(id=name, task=Task(id="t", fields={}), group_id="g", reward=reward)


ROLLOUTS, SAMPLES = [rollout("r", 1.0), rollout("s", 0.0)], [sample("r"), sample("s")]


def learner(backend: Recorder | None = None, **options) -> Learner:
    made = backend or Recorder()
    return Learner(TrainConfig(**options), made, made, lambda: None)


def run(one: Learner, step: int = 1):
    batch = one.batch(ROLLOUTS, SAMPLES)
    return batch, one.update(step, batch, Timer(), before_change=lambda: None)


def test_by_default_nothing_is_computed_twice():
    backend = Recorder()
    _, update = run(learner(backend))
    assert backend.asked == ["step"]
    assert update.record() == {}
    assert not update.excluded
    rows, loss = backend.trained[0]
    assert loss == LossSpec()
    assert all(row.old_logprobs is None and row.reference_logprobs is None and row.returns is None for row in rows)


def test_the_numbers_of_a_run_reach_the_loss():
    spec = loss_spec(
        TrainConfig(
            loss="sapo",
            sapo_tau_positive=2.0,
            sapo_tau_negative=3.0,
            dual_clip=4.0,
            dppo_divergence=0.5,
            entropy_coef=0.25,
            kl_coef=0.125,
            kl="k2",
            value_coef=0.75,
            value_clip=0.5,
        )
    )
    assert spec == LossSpec(
        name="sapo",
        tau_positive=2.0,
        tau_negative=3.0,
        dual_clip=4.0,
        divergence=0.5,
        entropy_coef=0.25,
        kl_coef=0.125,
        kl="k2",
        value_coef=0.75,
        value_clip=0.5,
    )


def test_statistics_are_those_of_the_first_pass():
    backend = Recorder()
    passes = iter((0.01, 0.5))
    learn = backend.forward_backward
    backend.forward_backward = lambda rows, loss: replace(learn(rows, loss), logprob_diff_mean=next(passes))
    _, update = run(learner(backend, epochs=2))
    assert backend.asked == ["step", "step"]
    assert update.stats.logprob_diff_mean == 0.01  # later the weights have moved, which is no mismatch


def test_a_correction_recomputes_log_probs_and_tells_what_it_saw():
    backend = Recorder(old=-1.0 + np.log(4.0))
    _, update = run(learner(backend, correction=("token_tis",), tis_cap=2.0, advantage="dr_grpo"))
    assert backend.asked == ["old", "step"]
    rows, _ = backend.trained[0]
    assert rows[0].old_logprobs is not None
    assert rows[0].advantages[1] == pytest.approx(0.5 * 2.0)
    assert update.record()["mismatch"]["weight_mean"] == pytest.approx(4.0)
    _, update = run(learner(backend, correction=("icepop",), icepop_high=3.0))
    assert sum(update.excluded.values()) == 8
    assert update.record()["mismatch"]["masked"] == 1.0


def test_the_kl_in_the_loss_or_in_the_reward():
    backend = Recorder()
    run(learner(backend, kl_coef=0.5))
    assert backend.asked == ["reference", "step"]
    assert backend.trained[0][0][0].reference_logprobs is not None
    backend = Recorder()
    batch, _ = run(learner(backend, kl_coef=0.5, kl_in="reward", kl="k1", advantage="reinforce"))
    assert backend.asked == ["old", "reference", "step"]
    rows, loss = backend.trained[0]
    assert loss.kl_coef == 0.0
    assert rows[0].reference_logprobs is not None  # so that the KL is measured all the same
    assert batch.advantages["r"] == pytest.approx(1.0 - 0.5 * 4 * 0.25)


def test_a_critic_is_asked_before_credit_is_given():
    backend = Recorder()
    batch, _ = run(learner(backend, advantage="gae", gamma=1.0, gae_lambda=1.0))
    assert backend.asked == ["values", "step"]
    row = batch.rows[0]
    assert row.returns.tolist() == [0, 1, 1, 0, 1, 1]
    assert row.old_values.tolist() == [0, 0.5, 0.5, 0, 0.5, 0.5]


def test_rewards_of_calls_reach_the_estimator():
    calls = {"r": np.array([1, 0], np.float32), "s": np.array([0, 0], np.float32)}
    batch = learner(advantage="return_to_go").batch(ROLLOUTS, SAMPLES, calls)
    assert batch.rows[0].advantages.tolist() == [0, 1, 1, 0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("advantage", "rewards", "of_calls", "signal"),
    [
        ("grpo", (1.0, 0.0), {}, True),
        ("grpo", (1.0, 1.0), {}, False),
        ("grpo", (1.0, None), {}, False),  # nobody is left to compare with
        ("grpo", (1.0, 1.0), {"r": [1, 0]}, False),  # it looks at no call
        ("return_to_go", (1.0, 1.0), {"r": [1, 0]}, True),
        ("return_to_go", (1.0, 1.0), {"r": [1, 0], "s": [1, 0]}, False),
        ("gigpo", (0.0, 0.0), {"s": [0, 0.5]}, True),
        ("pass_at_k", (0.25, 0.5), {}, False),  # neither is solved
        ("grpo_passk", (1.0, 1.0), {}, False),
    ],
)
def test_a_group_has_signal_where_the_estimator_finds_some(advantage, rewards, of_calls, signal):
    rollouts = [rollout(name, reward) for name, reward in zip("rs", rewards, strict=True)]
    calls = {name: np.array(values, np.float32) for name, values in of_calls.items()}
    one = learner(advantage=advantage, pass_k=1)
    assert one.has_signal(rollouts, SAMPLES, calls) is signal
    assert one.baseline.mean is None  # to look is not to learn


def test_a_sibling_without_a_trained_token_makes_no_signal():
    empty = replace(SAMPLES[0], loss_mask=np.zeros_like(SAMPLES[0].loss_mask))
    assert not learner().has_signal(ROLLOUTS, [empty, SAMPLES[1]], {})


def test_a_running_baseline_outlives_the_process():
    one = learner(advantage="reinforce_running", running_decay=0.5)
    assert one.batch(ROLLOUTS, SAMPLES).advantages == {"r": 0.5, "s": -0.5}
    one.batch([rollout("r", 1.0), rollout("s", None)], SAMPLES[:1])
    other = learner(advantage="reinforce_running", running_decay=0.5)
    other.recall({"kind": "step", **one.record()})
    assert other.baseline == one.baseline
    expected = (0.25 * 0.5 + 0.5 * 1.0) / 0.75
    assert other.batch(ROLLOUTS, SAMPLES).advantages["r"] == pytest.approx(1.0 - expected)
    assert learner().record() == {}


def test_a_running_baseline_is_of_what_is_compared_with_it():
    """With a KL off the reward that is the rest: a baseline without it would call every rollout worse than usual."""
    one = learner(advantage="reinforce_running", kl_coef=0.5, kl_in="reward", kl="k1")
    one.batch(ROLLOUTS, SAMPLES)
    assert one.baseline.mean == pytest.approx(0.5 - 0.5 * 4 * 0.25)  # four tokens, each 0.25 nats off


def test_a_mismatch_stops_the_run_before_the_weights_change():
    backend = Recorder()
    one = learner(backend, stop_on_mismatch=0.05)
    run(one)
    backend.difference, backend.asked = 0.06, []
    with pytest.raises(RunError, match=r"step 2: engine and trainer disagree by 0\.06.*stop_on_mismatch is 0\.05"):
        run(one, 2)
    assert backend.asked == []


def test_a_jump_is_measured_against_what_is_usual_across_restarts():
    backend = Recorder()
    one = learner(backend, stop_on_mismatch_jump=5.0)
    for step in (1, 2, 3):
        one.recall({"kind": "step", "step": step, "logprob_diff_mean": 0.01})
    one.recall({"kind": "step", "step": 4, "skipped": True})
    run(one, 5)
    backend.difference = 0.2
    with pytest.raises(RunError, match=r"median of the last 4 steps is 0\.01"):
        run(one, 6)
    backend.difference = 0.2
    run(learner(backend, stop_on_mismatch_jump=5.0))  # without a history nothing is unusual


def test_a_mismatch_is_no_matter_by_default():
    backend = Recorder()
    backend.difference = 1e9
    run(learner(backend))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"advantage": "grop"}, r"train\.advantage: there is no 'grop'.*grpo"),
        ({"loss": "ppo"}, r"train\.loss: there is no 'ppo'.*ppo_clip"),
        ({"gigpo_state": "past"}, r"train\.gigpo_state: there is no 'past'.*context"),
        ({"correction": ("tis",)}, r"train\.correction: there is no 'tis'.*token_tis"),
        ({"correction": ("token_tis", "sequence_tis")}, r"train\.correction: token_tis and sequence_tis both"),
        ({"dynamic_filter": True, "advantage": "reinforce_pp"}, r"train\.dynamic_filter: reinforce_pp learns from"),
        ({"kl": "k1", "kl_coef": 0.1}, r"train\.kl: as a term of the loss k1 has a gradient of 0"),
        ({"dynamic_filter": True, "advantage": "gae"}, r"train\.dynamic_filter: gae learns from"),
        ({"advantage": "pass_at_k", "pass_k": 4, "group_size": 4}, r"train\.pass_k: of 4 rollouts each set of 4"),
        ({"advantage": "pass_at_k", "kl_coef": 0.1, "kl_in": "reward"}, r"train\.kl_in: pass_at_k asks whether"),
        (
            {"dynamic_filter": True, "kl_coef": 0.1, "kl_in": "reward"},
            r"train\.dynamic_filter: with a KL off",
        ),
        ({"icepop_low": 2.0, "icepop_high": 1.0}, r"train\.icepop_low: 2 is above icepop_high, 1"),
        ({"geometric_low": 1.5}, r"train\.geometric_low: 1\.5 is above geometric_high"),
    ],
)
def test_names_and_numbers_that_do_not_fit_are_told_before_anything_starts(options, said):
    with pytest.raises(ConfigError, match=said):
        check(TrainConfig(**options))
    check(TrainConfig())
    check(TrainConfig(dynamic_filter=True, kl_coef=0.1, kl_in="loss"))
    check(TrainConfig(dynamic_filter=True, kl_in="reward"))  # without a coefficient there is no KL


OWN = """
import numpy as np


def halves(rewards, groups, context):
    return (rewards / 2).astype(np.float32)


def each_call(rewards, groups, context):
    return np.arange(len(context.steps.rollout), dtype=np.float32)


each_call.unit = "call"


def wrong(rewards, groups, context): ...


wrong.unit = "week"
nothing = 7


def same(sample, first):
    return "anywhere"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_credit.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_estimator_and_a_loss_of_ones_own(own):
    check(TrainConfig(advantage="own_credit:halves", loss="outrider.rl.losses.sapo:sapo"))
    assert learner(advantage="own_credit:halves").batch(ROLLOUTS, SAMPLES).advantages == {"r": 0.5, "s": 0.0}
    assert learner(advantage="own_credit:halves").record() == {"reward_baseline": [0.0, 0.0]}  # it may read it
    made = learner(advantage="own_credit:each_call").batch(ROLLOUTS, SAMPLES)
    assert [row.advantages.tolist() for row in made.rows] == [[0, 0, 0, 0, 1, 1], [0, 2, 2, 0, 3, 3]]
    made = learner(advantage="dr_gigpo", gigpo_state="own_credit:same").batch(ROLLOUTS, SAMPLES)
    # every call was made in the same state: the returns 1, 1, 0, 0 against their mean, beside the rollouts' own
    assert made.rows[0].advantages.tolist() == [0, 1, 1, 0, 1, 1]
    for name, said in (("wrong", "unit 'week'"), ("nothing", "is no function"), ("absent", "has no 'absent'")):
        with pytest.raises(ConfigError, match=rf"train\.advantage.*{said}"):
            check(TrainConfig(advantage=f"own_credit:{name}"))


def test_a_difference_that_is_no_number_is_not_what_is_usual():
    one = learner(stop_on_mismatch_jump=3.0)
    one.recall({"logprob_diff_mean": None})  # as a step with a gradient that was not finite is recorded
    for step, difference in enumerate((0.01, 0.01, 0.01), start=1):
        one.backend.difference = difference
        run(one, step)
    one.backend.difference = float("nan")
    with pytest.raises(RunError, match="disagree"):
        run(one, 4)
    quiet = learner()
    quiet.backend.difference = float("nan")
    run(quiet)
    assert quiet._differences == []
