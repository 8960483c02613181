"""Credit step by step: what a call earned later counts for it, what was earned before does not.

    return_to_go   G - b                  Williams 1992; Sutton & Barto 2018, section 13.4
    gigpo          A_rollout + w A_step   Feng et al. 2025, Group-in-Group Policy Optimization, arXiv:2505.10978
    gae            sum (gamma lam)^i d    Schulman et al. 2015, Generalized Advantage Estimation, arXiv:1506.02438

All read `context.steps` and `context.gamma`. With r the rewards of a rollout's steps, ``G_t = r_t + gamma G_(t+1)``.
A rollout that is only scored at its end has 0 before its last step: the sparse reward is the special case.

`return_to_go` takes as b the mean of G over the group at the same step, where a rollout that has ended by then counts
with its last. With sparse rewards and gamma 1 it is dr_grpo.

`gigpo` compares by GRPO's formula the rollouts of a group by their total reward, and the steps of a group that were
taken in the same state (`Steps.states`) by G; a state seen once adds nothing. w is `context.step_weight`. `dr_gigpo`
divides neither by a standard deviation, which the paper leaves open and its authors' code calls ``mean_norm``.

`gae` needs a critic, `Steps.values`: ``d_t = r_t + gamma V_(t+1) - V_t``, with V 0 after the end; it also reads
`context.lam`. Advantages come as they are; `make_batch` whitens them, as PPO's code does, and gives the critic
``advantage + V`` to learn. With lam 1 and V 0 it is G.

All but gae give exact zeros to a group of one rollout, or one whose rewards are all equal step by step (gigpo: and that
came into no state twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.errors import BatchError
from outrider.rl.advantages.check import all_equal, checked, checked_steps
from outrider.rl.advantages.context import NOTHING_MORE, Context, Doubles, Index, Reals
from outrider.rl.advantages.group import members, per_group, standard


def return_to_go(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """(S,), one for each step."""
    count = len(checked(rewards, groups))
    steps = checked_steps(context, count)
    returns = discounted(steps.rewards, steps.rollout, context.gamma)
    of_rollout = np.split(returns, last_steps(steps.rollout)[:-1] + 1)
    at = np.split(np.arange(len(returns)), last_steps(steps.rollout)[:-1] + 1)
    advantages = np.zeros(len(returns))
    for indices in members(groups):
        longest = max(len(of_rollout[i]) for i in indices)
        table = np.stack([np.pad(of_rollout[i], (0, longest - len(of_rollout[i])), mode="edge") for i in indices])
        centred = np.where(all_equal(table), 0.0, table - table.mean(0))  # (n, longest)
        for row, i in enumerate(indices):
            advantages[at[i]] = centred[row, : len(at[i])]
    return advantages


def gigpo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """(S,), one for each step. Reads `context.step_weight` too."""
    return _two_comparisons(rewards, groups, context, standard)


def dr_gigpo(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """(S,), one for each step. Reads `context.step_weight` too."""
    return _two_comparisons(rewards, groups, context, lambda r: r - r.mean())


def _two_comparisons(
    rewards: Reals, groups: Sequence[str], context: Context, formula: Callable[[Doubles], Doubles]
) -> Doubles:
    count = len(checked(rewards, groups))
    steps = checked_steps(context, count)
    if len(steps.states) != len(steps.rollout):
        raise BatchError(f"gigpo compares states: {len(steps.rollout)} steps have {len(steps.states)} state keys.")
    totals = np.bincount(steps.rollout, weights=steps.rewards, minlength=count).astype(np.float64)
    of_rollout = per_group(totals, groups, formula)
    returns = discounted(steps.rewards, steps.rollout, context.gamma)
    anchors = [
        f"{groups[rollout]} {state}" if state else f"step {index}"
        for index, (rollout, state) in enumerate(zip(steps.rollout, steps.states, strict=True))
    ]
    return of_rollout[steps.rollout] + context.step_weight * per_group(returns, anchors, formula)


def gae(rewards: Reals, groups: Sequence[str], context: Context = NOTHING_MORE) -> Doubles:
    """(S,), one for each step. Reads `context.lam` too."""
    steps = checked_steps(context, len(checked(rewards, groups)))
    if steps.values is None or np.shape(steps.values) != np.shape(steps.rewards):
        raise BatchError("gae needs a critic: steps have no value each. Set train.critic, or give Steps.values.")
    values = np.asarray(steps.values, dtype=np.float64)
    following = np.append(values[1:], 0.0)
    following[last_steps(steps.rollout)] = 0.0
    errors = steps.rewards + context.gamma * following - values
    return discounted(errors, steps.rollout, context.gamma * context.lam)


def discounted(rewards: Reals, rollout: Index, gamma: float) -> Doubles:
    """Return-to-go of each step, (S,): its own reward and those after it in its rollout, `gamma` less a step."""
    returns = np.asarray(rewards, dtype=np.float64).copy()
    for index in range(len(returns) - 2, -1, -1):
        if rollout[index] == rollout[index + 1]:
            returns[index] += gamma * returns[index + 1]
    return returns


def last_steps(rollout: Index) -> Index:
    """Positions of each rollout's last step."""
    return np.flatnonzero(np.append(np.diff(rollout) != 0, np.ones(min(1, len(rollout)), dtype=bool)))
