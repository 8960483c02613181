"""Prefixes shared across a group and within the trees of its rollouts change nothing but the tokens computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.calls import call, choice
from outrider import trajectory
from outrider.backends.torch import TorchBackend
from outrider.protocols import LossSpec
from outrider.types import Call, Row, Sample

SPEC = LossSpec(clip_low=0.9, clip_high=5.0)


class Agent:
    """Records the calls of one rollout."""

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.name, self.rng = name, rng
        self.calls: list[Call] = []

    def text(self, length: int) -> np.ndarray:
        return self.rng.integers(0, 300, length).astype(np.int32)

    def call(self, prompt: np.ndarray, answers: int = 1) -> np.ndarray:
        """Returns the prompt and the first answer."""
        sampled = [self.text(int(self.rng.integers(3, 7))) for _ in range(answers)]
        choices = [choice(ids, index, first=-self.rng.uniform(4, 7)) for index, ids in enumerate(sampled)]
        number = len(self.calls)
        self.calls.append(call(prompt, *choices, seq=number, id=f"{self.name}.{number}", attempt_id=self.name))
        return np.concatenate([prompt, sampled[0]])


def branching_rollout(name: str, system: np.ndarray, helper: np.ndarray, rng: np.random.Generator) -> Agent:
    """Two turns, the second best of two; an edited history; a sub-agent; a compaction, and a turn after it."""
    agent = Agent(name, rng)
    first = agent.call(system)
    second = agent.call(np.concatenate([first, agent.text(8)]), answers=2)
    agent.call(np.concatenate([first, agent.text(5)]))  # the observation was replaced
    sub = agent.call(np.concatenate([helper, agent.text(4)]))
    agent.call(np.concatenate([sub, agent.text(6)]))
    asked = np.concatenate([second, agent.text(9)])
    summary = agent.call(asked)[len(asked) :]
    agent.call(np.concatenate([system, summary, agent.text(3)]))
    return agent


def rows_of(samples: list[Sample]) -> list[Row]:
    rng = np.random.default_rng(5)
    advantage = {name: float(rng.normal()) for name in sorted({sample.rollout_id for sample in samples})}
    return [
        Row(
            sample=sample,
            advantages=np.where(sample.loss_mask, advantage[sample.rollout_id], 0).astype(np.float32),
            weights=np.where(sample.loss_mask, 0.01, 0).astype(np.float32),
        )
        for sample in samples
    ]


@pytest.fixture(scope="module", name="group")
def group_fixture() -> list[Agent]:
    rng = np.random.default_rng(0)
    system, helper = (rng.integers(0, 300, length).astype(np.int32) for length in (25, 15))
    return [branching_rollout(f"r{member}", system, helper, rng) for member in range(4)]


def trained(path, rows: list[Row], **options):
    backend = TorchBackend(path, precision="float32", threads=1, **options)
    stats = backend.forward_backward(rows, SPEC)
    gradient = torch.cat([parameter.grad.flatten() for parameter in backend._model.module.parameters()]).clone()
    return stats, gradient


@pytest.mark.parametrize("budget", [4096, 120])
def test_a_shared_tree_is_row_by_row_to_rounding(tiny, group, budget):
    merged = [
        sample
        for agent in group
        for sample in trajectory.build(agent.calls).samples(rollout_id=agent.name, group_id="g").samples
    ]
    alone = [
        sample
        for agent in group
        for recorded in agent.calls
        for sample in trajectory.build([recorded]).samples(rollout_id=agent.name, group_id="g").samples
    ]
    rows = rows_of(merged)
    shared, gradient = trained(tiny, rows, token_budget=budget)
    for other_rows in (rows, rows_of(alone)):
        stats, expected = trained(tiny, other_rows, share_prefixes=False)
        assert stats.tokens == shared.tokens
        assert stats.loss == pytest.approx(shared.loss, abs=1e-5)
        assert shared.tokens_computed < stats.tokens_computed
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    ids = [sample.token_ids[: int(np.flatnonzero(sample.loss_mask)[-1])].tolist() for sample in merged]
    distinct = len({tuple(row[:end]) for row in ids for end in range(1, len(row) + 1)})
    assert shared.tokens_computed == distinct + shared.tokens_recomputed
    assert (shared.tokens_recomputed > 0) == (budget < distinct)
