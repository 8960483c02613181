"""`outrider inspect`: the rollouts of a run as a table, and one of them in full. Nothing a model wrote can steer the
terminal: texts are cleaned and never read as markup."""

from __future__ import annotations

import difflib
import json
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError
from outrider.protocols import Store
from outrider.reports.call_view import call_view, legend
from outrider.reports.conversation import turns
from outrider.reports.exchanges import counted_attempt
from outrider.reports.offered import unseen_tools
from outrider.reports.text import clean, duration, number, one_line
from outrider.reports.tokens import Tokenizer
from outrider.types import Attempt, Failure, Reward, Rollout, RolloutState

_PIPE_WIDTH = 300
_STATE_STYLE = {
    RolloutState.SUCCEEDED: "green",
    RolloutState.FAILED: "red",
    RolloutState.CANCELLED: "yellow",
    RolloutState.RUNNING: "cyan",
    RolloutState.QUEUED: "dim",
}


def list_rollouts(
    store: Store,
    console: Console,
    *,
    split: str | None = None,
    step: int | None = None,
    state: RolloutState | None = None,
    limit: int = 50,
) -> None:
    """Print a table of the rollouts that match, at most `limit` rows, and a count of all of them."""
    found = store.rollouts(split=split, step=step, state=state)
    if not found:
        console.print(_nothing(store.rollouts(), split))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("rollout", "split", "step", "task", "state", "attempt", "reward", "failure", "reason"):
        right = title in ("step", "attempt", "reward")
        # The reason gets the room that is left; the rest, the id above all, is there to be copied.
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "reason")
    for rollout in found[:limit]:
        table.add_row(*_row(rollout))
    if console.is_terminal:
        console.print(table)
    else:  # a pipe has no width, and lines that are cut or broken are no use to grep
        Console(file=console.file, width=_PIPE_WIDTH, color_system=None).print(table)
    console.print()
    console.print(_counts(found, limit))


def _row(rollout: Rollout) -> list[Text]:
    return [
        Text(clean(rollout.id)),
        Text(one_line(rollout.split, 24)),
        Text(str(rollout.step)),
        Text(one_line(rollout.task.id, 24)),
        Text(rollout.state.value, _STATE_STYLE[rollout.state]),
        Text(str(rollout.attempt)),
        Text(number(rollout.reward)),
        Text("" if rollout.failure is Failure.NONE else rollout.failure.value, "red"),
        Text(one_line(rollout.reason, 80), "dim", no_wrap=True, overflow="ellipsis"),
    ]


def _counts(found: Sequence[Rollout], limit: int) -> Text:
    """How many there are of each split and state, and how many the limit hides."""
    text = Text()
    for split in dict.fromkeys(rollout.split for rollout in found):
        mine = [rollout for rollout in found if rollout.split == split]
        rewards = [rollout.reward for rollout in mine if rollout.reward is not None]
        states = Counter(rollout.state.value for rollout in mine)
        mean = f", mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards):,}" if rewards else ""
        text.append(f"{one_line(split, 40)}: ", "bold")
        text.append(", ".join(f"{count:,} {state}" for state, count in sorted(states.items())) + mean + "\n")
    hidden = len(found) - limit
    text.append(f"Showing {limit:,} of {len(found):,}; more with --limit.\n" if hidden > 0 else "", "yellow")
    return text


def _nothing(rollouts: Sequence[Rollout], split: str | None) -> Text:
    if not rollouts:
        return Text("There are no rollouts in this run yet.")
    splits = list(dict.fromkeys(rollout.split for rollout in rollouts))
    near = difflib.get_close_matches(split, splits, n=1) if split else []
    hint = f" Did you mean --split {near[0]}?" if near and near[0] != split else ""
    known = ", ".join(one_line(name, 40) for name in splits)
    return Text(f"No rollout matches, of {len(rollouts):,}.{hint} Splits here: {known}.")


def show_rollout(
    store: Store,
    rollout_id: str,
    console: Console,
    *,
    tokenizer: Tokenizer | None = None,
    all_tokens: bool = False,
) -> None:
    """Print one rollout: its task, attempts, calls turn by turn, and its reward with the reasons.

    `tokenizer` turns ids into one string each; without it ids are shown. `all_tokens` lists every token with its
    log-prob and cuts nothing. Raises `ConfigError` with near matches if there is no such rollout.
    """
    rollout = store.rollout(rollout_id)
    if rollout is None:
        raise ConfigError(_unknown(rollout_id, store.rollouts()))
    attempts = store.attempts(rollout.id)
    counted = counted_attempt(attempts, rollout)
    console.print(_head(rollout))
    console.print(Padding(Text(_task_fields(rollout, 0 if all_tokens else 2000), "dim"), (0, 0, 1, 2)))
    for attempt in attempts:
        console.print(_attempt(attempt, counts=attempt is counted, others=len(attempts) > 1))
    if counted is None:
        console.print(Text("No attempt of it is in the store.\n", "yellow"))
        return
    calls = store.calls(counted.id)
    if not calls:
        console.print(Text("The harness made no call.\n", "yellow"))
    else:
        console.print(legend())
        unseen = unseen_tools(calls, tokenizer)
        if unseen:
            console.print(Text(unseen, "yellow"))
    for position, turn in enumerate(turns(calls)):
        console.print(Rule(Text(f"call {position + 1} of {len(calls)}", "bold"), align="left", style="dim"))
        console.print(call_view(turn, [call.prompt_ids for call in calls], tokenizer, all_tokens=all_tokens))
    console.print(Rule(Text("reward", "bold"), align="left", style="dim"))
    console.print(_rewards(store.rewards(counted.id), rollout))


def _head(rollout: Rollout) -> Text:
    text = Text()
    text.append(f"{clean(rollout.id)}  ", "bold").append(rollout.state.value, _STATE_STYLE[rollout.state])
    if rollout.failure is not Failure.NONE:
        text.append(f"  {rollout.failure.value}", "red")
    words = f"\nsplit {rollout.split}, step {rollout.step}, group {rollout.group_id}, mode {rollout.mode.value}"
    text.append(clean(words), "dim")
    if rollout.sampling:
        text.append(f", {one_line(json.dumps(rollout.sampling), 200)}", "dim")
    text.append("\ntask ").append(clean(rollout.task.id), "bold")
    return text


def _task_fields(rollout: Rollout, limit: int) -> str:
    return clean(json.dumps(rollout.task.fields, ensure_ascii=False, indent=2, default=str), limit)


def _attempt(attempt: Attempt, *, counts: bool, others: bool) -> Padding:
    text = Text().append(f"attempt {attempt.number}", "bold")
    if others:
        text.append("  (its calls count)" if counts else "  (kept, not counted)", "dim")
    text.append(f"  {clean(attempt.id)}", "dim")
    ended = f"killed by signal {attempt.signal}" if attempt.signal else f"exit code {attempt.exit_code}"
    text.append(f"\n{'still running' if attempt.ended_at is None else ended}")
    if attempt.ended_at is not None:
        text.append(f" after {duration(attempt.ended_at - attempt.started_at)}")
    text.append(", over its time limit" if attempt.timed_out else "", "red")
    if attempt.failure is not Failure.NONE:
        text.append(f"\n{attempt.failure.value}", "red").append(f": {one_line(attempt.reason, 400)}")
    for name, tail in (("stdout", attempt.stdout_tail), ("stderr", attempt.stderr_tail)):
        if tail.strip():
            text.append(f"\n{name}: ", "dim").append(clean(tail.strip()[-1500:]))
    return Padding(text, (0, 0, 1, 0))


def _rewards(rewards: Sequence[Reward], rollout: Rollout) -> Text:
    if not rewards:
        why = f": {one_line(rollout.reason, 400)}" if rollout.reason else ""
        return Text(f"None was given{why}.\n", "yellow")
    text = Text()
    newest = {(reward.name, reward.call_id): reward for reward in rewards}
    for reward in newest.values():
        text.append(f"{one_line(reward.name, 60)} {number(reward.value, 4)}", "bold")
        text.append(f"  for call {one_line(reward.call_id, 60)}" if reward.call_id else "", "dim")
        text.append(f"  {one_line(reward.reason, 600)}\n")
        for name, value in reward.parts.items():
            text.append(f"  {one_line(name, 60)} {number(value)}\n")
        given = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reward.created_at))
        text.append(f"  by {one_line(reward.source, 60) or 'unknown'}, {given}\n", "dim")
    if len(rewards) > len(newest):
        text.append(f"{len(rewards) - len(newest)} older reward(s) of the same name are not shown.\n", "dim")
    return text


def _unknown(rollout_id: str, rollouts: Sequence[Rollout]) -> str:
    ids = [rollout.id for rollout in rollouts]
    near = difflib.get_close_matches(rollout_id, ids, n=3, cutoff=0.5)
    near += [found for found in ids if rollout_id and rollout_id in found and found not in near][: 3 - len(near)]
    hint = f" Near ones: {', '.join(clean(found) for found in near)}." if near else ""
    return f"rollout: no rollout {clean(rollout_id)!r} in this run ({len(ids):,} are there).{hint}"
