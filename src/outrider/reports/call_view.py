"""One call on the terminal: what was asked, what came back, and its tokens by mask and log-prob."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider.reports.conversation import Message, Turn
from outrider.reports.text import clean, duration, number, one_line
from outrider.reports.tokens import BOUNDS, Tokenizer, pieces, strength
from outrider.types import Call, CallState, Choice, Fidelity, IntArray, Retry, Runs

STRENGTH_STYLES = ("bold red", "yellow", "cyan", "green", "dim green")  # from hardly expected to near-certain
_MESSAGE_LIMIT = 2000  # characters
_CONTEXT_LIMIT = 48  # context tokens shown before the sampled ones
_SAMPLED_LIMIT = 400
_WORST = 5


def call_view(
    turn: Turn, prompts: Sequence[IntArray | None], tokenizer: Tokenizer | None, *, all_tokens: bool
) -> RenderableType:
    """A call with its messages, tokens and figures. `prompts` are the prompt ids of all calls of the attempt."""
    call = turn.call
    limit = 0 if all_tokens else _MESSAGE_LIMIT
    parts: list[RenderableType] = [_facts(call)]
    if turn.continues is not None:
        parts.append(Text(f"continues call {turn.continues + 1}: {turn.repeated} messages as there", "dim"))
    parts += [_message(message, limit, "blue") for message in turn.new]
    parts += [_message(message, limit, "magenta") for message in turn.replies]
    if call.retries:
        parts.append(Text(f"sent before: {one_line('; '.join(map(_sending, call.retries)), 500)}", "yellow"))
    if call.error:
        parts.append(Text(f"error: {one_line(call.error, 500)}", "red"))
    parts.append(_tokens(call, _known_context(turn, prompts), tokenizer, all_tokens=all_tokens))
    return Padding(Group(*parts), (0, 0, 1, 0))


def legend() -> Text:
    """What the colours of tokens mean."""
    text = Text().append("context", "dim")
    text.append("   sampled with p ")
    names = [f"< {BOUNDS[0]}", *(f"≥ {bound}" for bound in BOUNDS)]
    for name, style in zip(names, STRENGTH_STYLES, strict=True):
        text.append(f" {name} ", style)
    return text


def _facts(call: Call) -> Text:
    text = Text()
    text.append(call.fidelity.value, "green" if call.fidelity is Fidelity.EXACT else "yellow")
    if call.fidelity_reason:
        text.append(f": {one_line(call.fidelity_reason, 300)}", "yellow")
    if call.state is not CallState.COMPLETE:
        text.append(f"  {call.state.value}", "red")
    text.append(f"  HTTP {call.status}", "" if call.status < 400 else "red")
    streamed = ", streamed" if call.streamed else ""
    text.append(f"  {one_line(call.dialect, 40)}{streamed}, model {one_line(call.model, 60)}, {_versions(call)}", "dim")
    first = "" if call.first_token_s is None else f", first token after {duration(call.first_token_s)}"
    usage = ""
    if call.usage is not None:
        usage = f", {call.usage.prompt_tokens:,} prompt and {call.usage.completion_tokens:,} completion tokens"
    replica = f", {one_line(call.replica, 100)}" if call.replica else ""
    text.append(f"\n{duration(call.duration_s)}{first}{usage}{replica}", "dim")
    if call.continuation:
        text.append(f", prompt {one_line(call.continuation, 200)}", "dim")
    if call.sampling:
        text.append(f", {one_line(', '.join(f'{key} {value}' for key, value in call.sampling.items()), 200)}", "dim")
    return text


def _sending(retry: Retry) -> str:
    status = f"HTTP {retry.status}" if retry.status else "no answer"
    return f"{status} of {retry.replica} after {duration(retry.duration_s)}{retry.error and f' ({retry.error})'}"


def _versions(call: Call) -> str:
    if call.version_start is None and call.version_end is None:
        return "weights not ours"
    if call.version_start == call.version_end:
        return f"policy version {call.version_start}"
    return f"policy version {call.version_start} to {call.version_end}, swapped within the call"


def _runs(runs: Runs) -> str:
    """Which of its tokens are of which version, where that is known."""
    return "; " + ", ".join(f"{count:,} of version {version}" for version, count in runs) if runs else ""


def _message(message: Message, limit: int, style: str) -> RenderableType:
    text = Text(one_line(message.role, 40), f"bold {style}")
    return Group(text, Padding(Text(clean(message.text, limit)), (0, 0, 0, 2)))


def _known_context(turn: Turn, prompts: Sequence[IntArray | None]) -> int:
    """How many leading prompt ids are those of the call it continues, and so were shown there."""
    here = turn.call.prompt_ids
    if here is None or turn.continues is None:
        return 0
    there = prompts[turn.continues]
    if there is None:
        return 0
    length = min(len(here), len(there))
    differing = np.flatnonzero(here[:length] != there[:length])
    return int(differing[0]) if differing.size else length


def _tokens(call: Call, known: int, tokenizer: Tokenizer | None, *, all_tokens: bool) -> RenderableType:
    parts: list[RenderableType] = []
    for choice in call.choices:
        name = f"tokens, choice {choice.index}" if len(call.choices) > 1 else "tokens"
        finish = f", finish reason {one_line(str(choice.finish_reason), 40)}"
        parts.append(Text(f"{name}{finish}{_runs(choice.versions)}", "dim"))
        parts.append(Padding(_coloured(call, choice, known, tokenizer, all_tokens=all_tokens), (0, 0, 0, 2)))
        parts.append(Padding(_logprobs(choice, tokenizer), (0, 0, 0, 2)))
        if all_tokens:
            parts.append(Padding(_every_token(choice, tokenizer), (0, 0, 0, 2)))
    if not parts:
        return Text("no token ids: the upstream gave none", "dim")
    return Group(*parts)


def _coloured(call: Call, choice: Choice, known: int, tokenizer: Tokenizer | None, *, all_tokens: bool) -> Text:
    """Context dim, sampled tokens by log-prob. What the call before showed is only counted."""
    text = Text()
    prompt: list[int] = [] if call.prompt_ids is None else call.prompt_ids.tolist()
    start = 0 if all_tokens else max(known, len(prompt) - _CONTEXT_LIMIT)
    if start:
        text.append(f"[{start:,} context tokens] ", "dim italic")
    for piece in _readable(prompt[start:], tokenizer):
        text.append(piece, "dim")
    if call.prompt_ids is None:
        text.append("[context unknown] ", "dim italic")
    shown = len(choice.token_ids) if all_tokens else _SAMPLED_LIMIT
    ids = choice.token_ids[:shown].tolist()
    logprobs = choice.logprobs[:shown].tolist()
    for position, piece in enumerate(_readable(ids, tokenizer)):
        known_logprob = position < len(logprobs)  # a broken call may lack some
        text.append(piece, STRENGTH_STYLES[strength(logprobs[position])] if known_logprob else "reverse")
    if len(choice.token_ids) > shown:
        text.append(f" … {len(choice.token_ids) - shown:,} more sampled tokens, see --tokens", "dim italic")
    return text


def _readable(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Pieces of text, or the ids themselves where there is no tokenizer."""
    texts = pieces(ids, tokenizer)
    return [f"{token} " for token in ids] if texts is None else [clean(text) for text in texts]


def _logprobs(choice: Choice, tokenizer: Tokenizer | None) -> Text:
    """Sum, mean and the least expected tokens."""
    logprobs = choice.logprobs
    if not len(logprobs):
        return Text(f"{len(choice.token_ids):,} tokens, no log-probs", "dim")
    text = Text(
        f"{len(choice.token_ids):,} tokens, log-prob sum {logprobs.sum():.3f}, mean {logprobs.mean():.4f}", "dim"
    )
    ordered = np.argsort(logprobs, kind="stable")[:_WORST].tolist()
    worst = [i for i in ordered if i < len(choice.token_ids) and strength(float(logprobs[i])) < 3]
    if worst:
        names = _readable(choice.token_ids[worst].tolist(), tokenizer)
        listed = (f"{name.strip() or name!r} {logprobs[i]:.2f}" for name, i in zip(names, worst, strict=True))
        text.append(f"; least expected: {one_line(', '.join(listed), 200)}", "dim")
    return text


def _every_token(choice: Choice, tokenizer: Tokenizer | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    versions = [str(version) for version, count in choice.versions for _ in range(count)]
    for title in ("t", "id", "log-prob", "p", *(["version"] if versions else []), "text"):
        table.add_column(title, justify="left" if title == "text" else "right", no_wrap=True)
    ids = choice.token_ids.tolist()
    texts = pieces(ids, tokenizer) or [""] * len(ids)
    for position, (token, piece) in enumerate(zip(ids, texts, strict=True)):
        logprob = float(choice.logprobs[position]) if position < len(choice.logprobs) else float("nan")
        style = STRENGTH_STYLES[strength(logprob)]
        shown = Text(repr(clean(piece)), style) if tokenizer else Text()
        figures = [str(position), str(token), f"{logprob:.4f}", number(float(np.exp(logprob)))]
        table.add_row(*figures, *versions[position : position + 1], shown)
    return table
