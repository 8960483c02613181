"""Advantage estimators: from what rollouts earned to what their tokens are worth.

    ESTIMATORS["grpo"](rewards, groups) -> advantages
    ESTIMATORS["gigpo"](rewards, groups, Context(steps=steps, gamma=0.95)) -> advantages

`rewards` has shape (N,) and is finite: a rollout that is broken or was never scored is left out before, so that it
moves no sibling's baseline; one that failed by the policy's fault stays in, at its reward. `groups` names the group of
each rollout; groups may have any sizes and any order. The result is float64, whatever the rewards come in, and is
rounded where it enters a row. It is (N,), one for each rollout and so for all its tokens, or where `UNITS` says call or
token (S,), one for each of ``context.steps``. Estimators are pure functions, and count rollouts, never rows. Another
one is one more function and a line below, or ``module:function`` in a run file; such a function may have an attribute
``unit``, ``"call"`` or ``"token"``, where it answers for each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

from outrider.config import GROUP_BASELINES
from outrider.errors import ConfigError
from outrider.rl.advantages.context import Context, Estimator, Steps
from outrider.rl.advantages.group import dr_grpo, gpg, grpo, opo, rloo
from outrider.rl.advantages.pass_at_k import grpo_passk, pass_at_k
from outrider.rl.advantages.reinforce import (
    RunningMean,
    reinforce,
    reinforce_pp,
    reinforce_pp_baseline,
    reinforce_running,
)
from outrider.rl.advantages.steps import dr_gigpo, gae, gigpo, return_to_go
from outrider.rl.find import find

Unit = Literal["rollout", "call", "token"]

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "opo": opo,
        "gpg": gpg,
        "pass_at_k": pass_at_k,
        "grpo_passk": grpo_passk,
        "reinforce": reinforce,
        "reinforce_running": reinforce_running,
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "return_to_go": return_to_go,
        "gigpo": gigpo,
        "dr_gigpo": dr_gigpo,
        "gae": gae,
        "gae_call": gae,
    }
)

UNITS: Mapping[str, Unit] = MappingProxyType(
    {"return_to_go": "call", "gigpo": "call", "dr_gigpo": "call", "gae_call": "call", "gae": "token"}
)
"""What gets an advantage of its own; a rollout where nothing is said."""

CRITICS = frozenset({"gae", "gae_call"})
"""Estimators that need a value head."""


def find_estimator(name: str) -> Estimator:
    """By name or as ``module:function``. Raises `ConfigError`."""
    return find(ESTIMATORS, name, "train.advantage")


def compares_within_groups(name: str) -> bool:
    """Whether a group of one, or of equal rewards, teaches the estimator called `name` nothing. That is assumed of
    somebody else's."""
    return name in GROUP_BASELINES or name not in ESTIMATORS


def unit_of(name: str) -> Unit:
    """What the estimator called `name` answers for. Raises `ConfigError`."""
    if name in ESTIMATORS:
        return UNITS.get(name, "rollout")
    unit = getattr(find_estimator(name), "unit", "rollout")
    if unit not in get_args(Unit):
        raise ConfigError(f"train.advantage: {name} has the unit {unit!r}; it must be one of {get_args(Unit)}.")
    return cast(Unit, unit)


__all__ = [
    "CRITICS",
    "ESTIMATORS",
    "UNITS",
    "Context",
    "Estimator",
    "RunningMean",
    "Steps",
    "Unit",
    "compares_within_groups",
    "dr_gigpo",
    "dr_grpo",
    "find_estimator",
    "gae",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "opo",
    "pass_at_k",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "reinforce_running",
    "return_to_go",
    "rloo",
    "unit_of",
]
