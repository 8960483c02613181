"""Held-out tasks before and after training, side by side, as chat turns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocols import Store
from outrider.reports.conversation import Message, Turn, turns
from outrider.reports.markup import card, esc, folded, paragraph, pill, section
from outrider.reports.text import number, one_line
from outrider.reports.tokens import Tokenizer, pieces, strength
from outrider.types import Attempt, Failure, Fidelity, Reward, Rollout

_MESSAGE_LIMIT = 4000  # characters of one message
_TURN_LIMIT = 30  # calls of one attempt
_TOKEN_LIMIT = 800  # tokens of one reply that are shown one by one

FIXED, STILL, BROKE, STAYED = "failed before, succeeds after", "still fails", "fails now only", "succeeds both times"
KINDS = {FIXED: "good", STAYED: "good", STILL: "bad", BROKE: "bad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One held-out task: its rollout before, and after (None while there is none)."""

    task_id: str
    before: Rollout
    after: Rollout | None
    outcome: str


def pair_up(before: Sequence[Rollout], after: Sequence[Rollout], success_from: float) -> list[Pair]:
    """Scored rollouts of the same task, in order of task id; of several the newest step's, then the lowest id."""
    firsts, lasts = _by_task(before), _by_task(after)
    pairs = []
    for task_id in sorted(firsts):
        first, last = firsts[task_id], lasts.get(task_id)
        if lasts and last is None:
            continue
        outcome = "before training"
        if last is not None:
            won_before, won_after = _won(first, success_from), _won(last, success_from)
            outcome = (STAYED if won_before else FIXED) if won_after else (BROKE if won_before else STILL)
        pairs.append(Pair(task_id=task_id, before=first, after=last, outcome=outcome))
    return pairs


def choose(pairs: Sequence[Pair], count: int = 3) -> list[Pair]:
    """Tasks that training fixed and one that still fails, filled up with others; a function of `pairs` alone."""
    of = {outcome: [pair for pair in pairs if pair.outcome == outcome] for outcome in (FIXED, STILL, BROKE, STAYED)}
    preferred = [*of[FIXED][: count - 1], *of[STILL][:1]]
    others = [*of[FIXED][count - 1 :], *of[BROKE], *of[STAYED], *of[STILL][1:], *pairs]
    chosen: list[Pair] = []
    for pair in [*preferred, *others]:
        if pair not in chosen and len(chosen) < count:
            chosen.append(pair)
    return chosen


def exchanges(store: Store, success_from: float, tokenizer: Tokenizer | None) -> str:
    """The section with three tasks. Greedy rollouts where there are any, sampled ones otherwise."""
    for how in ("greedy", "sampled"):
        before, after = store.rollouts(split=f"before/{how}"), store.rollouts(split=f"after/{how}")
        pairs = pair_up(before, after, success_from)
        if pairs:
            break
    else:
        return section("Held-out tasks, before and after", paragraph("No held-out rollout has a reward yet.", "none"))
    counts = Counter(pair.outcome for pair in pairs)
    figures = [f"{counts[outcome]:,} {pill(outcome, KINDS[outcome])}" for outcome in KINDS if counts[outcome]]
    found = f"{len(pairs):,} held-out tasks, {how}" + (f": {', '.join(figures)}." if figures else ", before training.")
    words = "Sampled tokens are tinted by how unexpected they were: the redder, the less likely." if tokenizer else ""
    shown = [_pair(store, pair, success_from, tokenizer) for pair in choose(pairs)]
    return section("Held-out tasks, before and after", paragraph(f"{found} {words}", "soft"), *shown)


def _pair(store: Store, pair: Pair, success_from: float, tokenizer: Tokenizer | None) -> str:
    kind = KINDS.get(pair.outcome, "plain")
    head = f"<h3>Task {esc(pair.task_id, 100)} {pill(esc(pair.outcome), kind)}</h3>"
    fields = json.dumps(pair.before.task.fields, ensure_ascii=False, default=str)
    sides = [_side("before", store, pair.before, success_from, tokenizer)]
    if pair.after is not None:
        sides.append(_side("after", store, pair.after, success_from, tokenizer))
    return (
        f'<div class="pair">{head}<p class="task">{esc(fields, 600)}</p><div class="grid2">{"".join(sides)}</div></div>'
    )


def _side(name: str, store: Store, rollout: Rollout, success_from: float, tokenizer: Tokenizer | None) -> str:
    attempt = counted_attempt(store.attempts(rollout.id), rollout)
    kind = "good" if _won(rollout, success_from) else "bad"
    parts = [f"<h3>{name} {pill(f'reward {number(rollout.reward)}', kind)}</h3>"]
    if attempt is None:
        return card(*parts, paragraph("Its attempt is not in the store.", "none"))
    reward = final_reward(store.rewards(attempt.id))
    parts.append(_why(rollout, attempt, reward))
    calls = store.calls(attempt.id)
    shown = turns(calls)
    if not shown:
        parts.append(paragraph("The harness made no call.", "none"))
    for position, turn in enumerate(shown[:_TURN_LIMIT]):
        parts.append(_turn(turn, tokenizer, first=position == 0))
    if len(shown) > _TURN_LIMIT:
        parts.append(paragraph(f"{len(shown) - _TURN_LIMIT} further calls are not shown.", "none"))
    return card(*parts)


def _why(rollout: Rollout, attempt: Attempt, reward: Reward | None) -> str:
    words = [esc(reward.reason if reward and reward.reason else rollout.reason, 600)]
    if reward and reward.parts:
        words.append(", ".join(f"{esc(name, 60)} {number(value)}" for name, value in reward.parts.items()))
    if attempt.failure is not Failure.NONE:
        words.append(f"{attempt.failure.value.replace('_', ' ')}: {esc(attempt.reason, 300)}")
    return f'<p class="why">{"<br>".join(filter(None, words))}</p>'


def _turn(turn: Turn, tokenizer: Tokenizer | None, *, first: bool) -> str:
    """New messages, then the replies. What precedes the last message of a first request is folded: it is the same for
    every task as a rule."""
    context, new = (turn.new[:-1], turn.new[-1:]) if first and len(turn.new) > 1 else ((), turn.new)
    parts = []
    if context:
        inside = [_bubble(message.role, esc(message.text, _MESSAGE_LIMIT)) for message in context]
        parts.append(folded(f"{len(context)} messages of context", *inside))
    if turn.continues is None and not first:
        parts.append(paragraph("A new branch: this request continues none before it.", "none"))
    parts += [_bubble(message.role, esc(message.text, _MESSAGE_LIMIT)) for message in new]
    for index, message in enumerate(turn.replies):
        sampled = message.role == "assistant"  # and no error of the upstream
        role = "assistant, sampled" if sampled else message.role
        parts.append(_bubble(role, _reply(turn, index, message, tokenizer), sampled=sampled))
    if turn.call.error:
        parts.append(f'<p class="why">{esc(turn.call.error, 300)}</p>')
    return "".join(parts)


def _reply(turn: Turn, index: int, message: Message, tokenizer: Tokenizer | None) -> str:
    """The tokens as sampled where they are known exactly, the text otherwise."""
    call = turn.call
    choice = call.choices[index] if index < len(call.choices) else None
    if choice is None or call.fidelity is not Fidelity.EXACT or len(choice.logprobs) != len(choice.token_ids):
        return esc(message.text, _MESSAGE_LIMIT)
    texts = pieces(choice.token_ids[:_TOKEN_LIMIT].tolist(), tokenizer)
    if texts is None:
        return esc(message.text, _MESSAGE_LIMIT)
    spans = [
        f'<span class="h{strength(logprob)}" title="id {token}, log-prob {logprob:.3f}">{esc(text)}</span>'
        for text, token, logprob in zip(texts, choice.token_ids.tolist(), choice.logprobs.tolist(), strict=False)
    ]
    left_out = len(choice.token_ids) - len(texts)
    return "".join(spans) + (f" … ({left_out:,} more tokens)" if left_out else "")


def _bubble(role: str, content: str, *, sampled: bool = False) -> str:
    kind = "turn sampled" if sampled else "turn"
    return (
        f'<div class="{kind}"><div class="role">{esc(one_line(role, 40))}</div><div class="msg">{content}</div></div>'
    )


def counted_attempt(attempts: Sequence[Attempt], rollout: Rollout) -> Attempt | None:
    """The attempt whose calls count: the rollout's current one."""
    return next((attempt for attempt in attempts if attempt.number == rollout.attempt), None)


def final_reward(rewards: Sequence[Reward]) -> Reward | None:
    """The newest reward of the whole attempt that is called ``final``."""
    return next((reward for reward in reversed(rewards) if reward.name == "final" and not reward.call_id), None)


def _by_task(rollouts: Sequence[Rollout]) -> dict[str, Rollout]:
    found: dict[str, Rollout] = {}
    for rollout in sorted(rollouts, key=lambda one: (-one.step, one.id)):
        if rollout.reward is not None:
            found.setdefault(rollout.task.id, rollout)
    return found


def _won(rollout: Rollout, success_from: float) -> bool:
    return rollout.reward is not None and rollout.reward >= success_from
