"""What a template writes between a sampled answer and the next one: the difference of two renders, checked.

    before   T(history, answer)                           … ANSWER <|im_end|> \\n
    after    T(history, answer, new messages, opening)    … ANSWER <|im_end|> \\n <|im_start|> user …

The answer is a stand-in, so that the place where it ends can be found in both. What `after` has beyond `before` is the
text of the new messages, rendered together and in their place: consecutive tool results are merged as the template
merges them. The end of the turn is the first control token after a plain answer; it is added where the model did not
sample it (an answer cut by its length limit), and what follows it up to the new messages never is sampled.

The bridge is refused unless `after` goes on where `before` ends, and what precedes the answer is the same in both. The
last is where a template that forgets earlier reasoning shows itself.

A whole history need not be rendered for that. One of the same shape, two to four short messages, does; whether it does
is checked against the real history once for each shape, and where the two ever differ the real one is used from then
on.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.renderers.chat_template import ChatTemplate, TemplateRefused
from outrider.renderers.encoding import TokenText
from outrider.renderers.reply import THINK
from outrider.renderers.shape import STUB_TOOL, Traits, shape, shape_tools, stub_call
from outrider.types import Break, Json

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_SHAPES_KEPT = 1024
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suffix:
    """What follows the sampled ids of an answer."""

    close: int | None
    """Ends the turn, where the model did not sample it itself."""
    text: str
    """All that comes after the end of the turn, the opening of the next answer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What precedes an answer that the agent has begun."""

    text: str
    """That opens any answer."""
    between: str
    """What the template writes there besides, such as an empty thought."""


class Bridge:
    """Thread-safe. Raises nothing: what cannot be proven is a `Break`."""

    def __init__(self, template: ChatTemplate, text: TokenText, traits: Traits) -> None:
        self._template = template
        self._text = text
        self._traits = traits
        self._mark = "answer" + secrets.token_hex(8)
        self._thought = "thought" + secrets.token_hex(8)
        self._close = self._find_close()
        self._lock = threading.Lock()
        self._short_serves: dict[Any, bool] = {}

    def suffix(
        self, history: Sequence[Json], reply: Json, new: Sequence[Json], tools: Sequence[Json] | None, options: Json
    ) -> Suffix | Break:
        """What follows `reply`, the answer to `history`, before the answer to `new`."""
        key = _shape_key(history, reply, new, tools, options)
        return self._short_or_whole(
            key,
            lambda: self._difference(self._short(history), reply, new, [STUB_TOOL] if tools else None, options),
            lambda: self._difference(list(history), reply, new, tools, options),
        )

    def opening(
        self, messages: Sequence[Json], begun: str, tools: Sequence[Json] | None, options: Json
    ) -> Opening | None:
        """What precedes `begun`, the beginning of the answer to `messages`; None where the template does not write it
        as it is, behind the opening of an answer."""
        system = messages[0]["role"] in ("system", "developer")
        length, thoughts = _length_class(messages), _thoughts(messages)
        key = (system, length, messages[-1]["role"], thoughts, bool(tools), repr(sorted(options.items())))
        return self._short_or_whole(
            key,
            lambda: self._opening(self._short(messages), begun, [STUB_TOOL] if tools else None, options),
            lambda: self._opening(messages, begun, tools, options),
        )

    def _short_or_whole(self, key: Any, short: Callable[[], Found], whole: Callable[[], Found]) -> Found:
        """What `short` finds if it is known to find the same as `whole` for histories of this shape."""
        with self._lock:
            serves = self._short_serves.get(key)
        if serves is False:
            return whole()
        found = short()
        if serves:
            return found
        real = whole()
        if real is None:  # nothing was found that the short one could have found too
            return real
        with self._lock:
            if len(self._short_serves) >= _SHAPES_KEPT:
                self._short_serves.clear()
            self._short_serves[key] = found == real
        return real

    def _opening(
        self, messages: Sequence[Json], begun: str, tools: Sequence[Json] | None, options: Json
    ) -> Opening | None:
        offered = shape_tools(tools, self._text)

        def render(*said: str, generate: bool = False) -> str:
            told = [*messages, *({"role": "assistant", "content": text} for text in said)]
            return self._template.render(shape(told, self._text, self._traits), offered, options, generate=generate)

        try:
            before, opened, marked, whole = render(), render(generate=True), render(self._mark), render(begun)
        except TemplateRefused:
            return None
        head, found, _ = marked.rpartition(self._mark)
        if not found or not opened.startswith(before) or not head.startswith(opened):
            return None
        written = self._text.guard(begun, only_control=True)
        if not whole.startswith(head + written) or head.rstrip().endswith(THINK):
            return None
        return Opening(text=opened[len(before) :], between=head[len(opened) :])

    # -- two renders -----------------------------------------------------------------------------------------------

    def _difference(
        self, history: list[Json], reply: Json, new: Sequence[Json], tools: Sequence[Json] | None, options: Json
    ) -> Suffix | Break:
        told = [*history, self._stand_in(reply)]
        offered = shape_tools(tools, self._text)
        try:
            before = self._template.render(shape(told, self._text, self._traits), offered, options, generate=False)
            shaped = shape([*told, *new], self._text, self._traits)
            after = self._template.render(shaped, offered, options, generate=True)
        except TemplateRefused:
            return Break.UNKNOWN
        head, found, tail = before.rpartition(self._mark)
        head_after, _, rest = after.partition(self._mark)
        if not found or self._mark in head or self._mark in rest or not rest.startswith(tail):
            return Break.UNKNOWN
        if head != head_after:
            forgotten = _forgets(history, reply, head, head_after, self._thought)
            if forgotten:
                return Break.REASONING_DROPPED_BY_TEMPLATE
            if _EMPTY_THOUGHT.sub("", head) != _EMPTY_THOUGHT.sub("", head_after):
                return Break.UNKNOWN
        return self._cut(tail, rest[len(tail) :], plain=not reply.get("tool_calls"))

    def _cut(self, tail: str, rest: str, *, plain: bool) -> Suffix | Break:
        """Divide what follows an answer at the token that ends the turn."""
        ids = self._text.encode(tail)
        close = self._close if self._close in ids else next((i for i in reversed(ids) if self._ends(i)), None)
        if close is None:
            # Nothing in the template ends a turn: what it writes there is all context. After a call that would hold
            # a part of the call's own text, and there is no telling how much.
            return Suffix(close=None, text=tail + rest) if plain else Break.UNKNOWN
        spelling = self._text.decode([close])
        _, found, glue = tail.partition(spelling) if plain else tail.rpartition(spelling)
        return Suffix(close=close, text=glue + rest) if found else Break.UNKNOWN

    def _ends(self, token: int) -> bool:
        return token in self._text.special_ids

    def _find_close(self) -> int | None:
        """The first control token after a plain answer."""
        chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": self._mark}]
        try:
            _, _, tail = self._template.render(chat, None, {}, generate=False).rpartition(self._mark)
        except TemplateRefused:
            return None
        return next((i for i in self._text.encode(tail) if self._ends(i)), None)

    # -- stand-ins -------------------------------------------------------------------------------------------------

    def _stand_in(self, reply: Json) -> Json:
        made: Json = {"role": "assistant", "content": self._mark}
        if reply.get("reasoning_content"):
            made["reasoning_content"] = self._thought
        calls = reply.get("tool_calls")
        if calls:
            made["content"] = "c" if reply["content"] else ""
            made["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"k": "v"}}} for call in calls
            ]
            made["tool_calls"][-1]["function"]["arguments"] = {"k": self._mark}
        return made

    def _short(self, history: Sequence[Json]) -> list[Json]:
        """A history as short as can be, in which the template finds what decides how it goes on."""
        made: list[Json] = []
        if history and history[0]["role"] in ("system", "developer"):
            made.append({"role": "system", "content": "s"})
        made.append({"role": "user", "content": "u"})
        if _thoughts(history):
            call = {"tool_calls": [stub_call("stub", {"k": "v"})]}
            made.append({"role": "assistant", "content": "", "reasoning_content": self._thought + "-earlier", **call})
            made.append({"role": "tool", "tool_call_id": "call00000", "name": "stub", "content": "r"})
        return made


def _thoughts(history: Sequence[Json]) -> int:
    """How many answers since the user's last message have reasoning."""
    count = 0
    for message in reversed(history):
        if message["role"] == "user":
            break
        count += message["role"] == "assistant" and bool(message.get("reasoning_content"))
    return count


def _forgets(history: Sequence[Json], reply: Json, before: str, after: str, thought: str) -> bool:
    """Reasoning that is in `before` is gone from `after`."""
    thoughts = [message["reasoning_content"].strip() for message in history if message.get("reasoning_content")]
    if reply.get("reasoning_content"):
        thoughts.append(thought)
    return any(before.count(one) > after.count(one) for one in thoughts)


def _length_class(history: Sequence[Json]) -> int:
    length = len(history)
    return length if length < 4 else 4 + length.bit_length()


def _shape_key(
    history: Sequence[Json], reply: Json, new: Sequence[Json], tools: Sequence[Json] | None, options: Json
) -> Any:
    return (
        bool(history) and history[0]["role"] in ("system", "developer"),
        _length_class(history),
        _thoughts(history),
        bool(reply["content"]),
        bool(reply.get("reasoning_content")),
        len(reply.get("tool_calls") or ()),
        tuple(message["role"] for message in new),
        bool(tools),
        repr(sorted(options.items())),
    )
