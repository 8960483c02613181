"""PPO with a critic, whole: real processes, the tiny model, the value head of the torch backend."""

import json

import pytest

from fakes.tiny_run import REWARD, finish, start

pytestmark = pytest.mark.slow

STEPS = 6


def steps(project) -> list[dict]:
    records = [json.loads(line) for line in (project / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "step"]


def test_gae_trains_its_critic_and_goes_on_with_it_after_a_restart(project):
    # Rewards of 2 and 3: most of what there is to know about a state is the mean, which a critic learns soon.
    (project / "odd_or_even.py").write_text(REWARD.replace("float(", "2.0 + float("))
    options = ["train.advantage=gae", "train.critic_lr=0.02", "train.lr=1e-4", "train.warmup_steps=0", "eval.limit=1"]
    for until in (STEPS - 1, STEPS):  # the last step is taken by a second start
        status, output = finish(start(project, *options, f"train.steps={until}"))
        assert status == 0, output
    records = steps(project)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    losses = [record["value_loss"] for record in records]
    assert losses[0] > 1.5  # it begins at 0: (2**2 .. 3**2) / 2
    assert losses[-1] < losses[0] / 2
    assert losses[-1] < losses[-2] * 1.5  # a critic that had been forgotten would begin at 0 again
    assert all(record["tokens"] and not record["update_skipped"] for record in records)
