"""An answer parsed from its ids: reasoning, text, tool calls.

A marker that the vocabulary has as one token counts only as that token: text that merely spells ``<tool_call>`` stays
text. Where the vocabulary has no such token (SmolLM2's has none), the spelling counts.

Pieces come out as soon as they are certain. Joined they are the same, however the ids were cut into pieces: what a
gateway parses again from recorded ids is what the agent was sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import msgspec

from outrider.renderers.encoding import TokenText
from outrider.wire import ParsedCall, ReplyDelta, ReplyParser

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKERS = (THINK, THINK_END, CALL, CALL_END)

State = Literal["start", "thinking", "text", "call", "bare"]


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_functions = msgspec.json.Decoder(list[_Function])
_function = msgspec.json.Decoder(_Function)


class TaggedReply:
    """``<think>…</think>`` before the text, ``<tool_call>{"name": …, "arguments": …}</tool_call>`` in it.

    Satisfies `wire.ReplyParser`. Blank space is dropped where the format puts it: around a thought, and between
    text and calls. Text alone comes out to the byte.
    """

    def __init__(self, text: TokenText, *, thinking: bool, tools: frozenset[str], bare_calls: bool = False) -> None:
        """`thinking`: the prompt ended inside a thought. Calls are looked for where there are `tools`; `bare_calls`
        takes an answer that is nothing but a call's JSON for one, as Llama's write them."""
        self._text = text
        self._stream = text.stream()
        self._marker_ids = {text.added[marker]: marker for marker in MARKERS if marker in text.added}
        self._spelled = tuple(marker for marker in MARKERS if marker not in text.added)
        self._tools = tools
        self._bare = bare_calls and bool(tools)
        self._state: State = "thinking" if thinking else "start"
        self._held = ""  # may be the beginning of a marker
        self._body = ""  # of a call, or of an answer that may be one
        self._blank = ""  # may be nothing, or the space between two words
        self._fresh = thinking  # blank space that comes now belongs to the format
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ParsedCall] = []

    def feed(self, token_ids: Sequence[int]) -> ReplyDelta:
        for token in token_ids:
            marker = self._marker_ids.get(token)
            if marker is not None:
                self._cut()
                self._mark(marker)
            elif token in self._text.special_ids:
                self._cut()
            else:
                self._spell(self._stream.push(token))
        return self._certain()

    def finish(self) -> ReplyDelta:
        """The rest, once no more ids come."""
        self._cut()
        if self._state == "call":
            self._end_call(closed=False)
        elif self._state in ("bare", "start"):
            self._end_bare()
        if self._state == "text":
            self._content.append(self._blank)
        return self._certain()

    def _certain(self) -> ReplyDelta:
        delta = ReplyDelta(reasoning="".join(self._reasoning), content="".join(self._content), calls=tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return delta

    # -- text and markers ------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        """A control token: nothing that is spelled goes on over it."""
        self._stream.restart()
        held, self._held = self._held, ""
        self._take(held)

    def _spell(self, piece: str) -> None:
        """Take text in, looking for markers that are spelled out."""
        self._held += piece
        while self._held:
            found = [(at, marker) for marker in self._spelled if (at := self._held.find(marker)) >= 0]
            if not found:
                sure = len(self._held) - max((overlap(self._held, marker) for marker in self._spelled), default=0)
                self._take(self._held[:sure])
                self._held = self._held[sure:]
                return
            at, marker = min(found)
            self._take(self._held[:at])
            self._held = self._held[at + len(marker) :]
            self._mark(marker)

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._state == "start":
            self._body += text
            begun = self._body.lstrip()
            if not begun:
                return
            if self._bare and begun.startswith("{"):
                self._state = "bare"
                return
            text, self._body, self._state = self._body, "", "text"
        if self._state in ("call", "bare"):
            self._body += text
        elif self._state == "thinking":
            self._add(self._reasoning, text, hold=True)
        else:
            self._add(self._content, text, hold=bool(self._tools))

    def _add(self, pieces: list[str], text: str, *, hold: bool) -> None:
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        text = self._blank + text
        sure = len(text.rstrip()) if hold else len(text)
        pieces.append(text[:sure])
        self._blank = text[sure:]

    def _mark(self, marker: str) -> None:
        if marker == THINK and self._state == "start" and not self._fresh:
            self._begin("thinking")
        elif marker == THINK_END and self._state == "thinking":
            self._begin("start")
        elif marker == CALL and self._tools and self._state in ("start", "text"):
            self._state, self._body = "call", ""
        elif marker == CALL_END and self._state == "call":
            self._end_call(closed=True)
        else:
            self._take(marker)

    def _begin(self, state: State) -> None:
        self._state, self._body, self._blank, self._fresh = state, "", "", True

    # -- calls -----------------------------------------------------------------------------------------------------

    def _end_call(self, *, closed: bool) -> None:
        calls, body = read_calls(self._body), self._body
        if calls is None:
            self._state = "text"
            self._take(CALL + body + (CALL_END if closed else ""))
        else:
            self._calls += calls
            self._begin("text")

    def _end_bare(self) -> None:
        calls, body = read_calls(self._body), self._body
        self._state, self._body = "text", ""
        if self._bare and calls and all(call.name in self._tools for call in calls):
            self._calls += calls
        else:
            self._take(body)


class RestOfReply:
    """An answer whose beginning stands in the prompt: parsed as a whole, told without that. Satisfies
    `wire.ReplyParser`."""

    def __init__(self, whole: ReplyParser, begun: str, begun_ids: Sequence[int]) -> None:
        """`begun_ids` are any that spell `begun`, which is plain text."""
        self._whole = whole
        self._begun = begun
        self._rest(whole.feed(begun_ids))

    def feed(self, token_ids: Sequence[int]) -> ReplyDelta:
        return self._rest(self._whole.feed(token_ids))

    def finish(self) -> ReplyDelta:
        return self._rest(self._whole.finish())

    def _rest(self, part: ReplyDelta) -> ReplyDelta:
        both = min(len(self._begun), len(part.content))
        if self._begun[:both] != part.content[:both]:  # what was left of it was blank space, and dropped
            self._begun = ""
            return part
        self._begun = self._begun[both:]
        return part._replace(content=part.content[both:])


def is_plain(parser: ReplyParser, text: str, ids: Sequence[int]) -> bool:
    """`parser` makes nothing but text of `text`, which `ids` spell."""
    parts = [parser.feed(ids), parser.finish()]
    only_text = not any(part.calls or part.reasoning for part in parts)
    return only_text and "".join(part.content for part in parts) == text


def read_calls(body: str) -> list[ParsedCall] | None:
    """The calls that a call's JSON holds, one or a list; None where it is none. Arguments stay as they are written."""
    try:
        data = body.strip().encode()
        found = _functions.decode(data) if data.startswith(b"[") else [_function.decode(data)]
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    return [ParsedCall(name=one.name, arguments=_arguments(one)) for one in found] or None


def _arguments(function: _Function) -> str:
    text = (bytes(function.arguments) or bytes(function.parameters)).decode()
    if text in ("", "null"):
        return "{}"
    return str(json.loads(text)) if text.startswith('"') else text


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`."""
    for size in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
