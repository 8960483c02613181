"""A scripted engine that plays `harnesses.model` in ids: over ``/v1/completions`` and over chat.

Who sends ids does not say what they stand for, and some templates leave the tools out. So gateway and engine share one
renderer, which remembers what it was asked to render.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fakes.engine import Json
from fakes.token_engine import Ids, TokenEngine
from harnesses.model import CALL, CALL_END, Say, Use, decide, render_call
from outrider.renderers.library import AutoRenderer
from outrider.types import Break
from outrider.wire import ReplyParser

END = "<|im_end|>"
RENDERER = "harnesses.engine:remembering"
"""What a gateway is given as its renderer."""


class Remembering:
    """Satisfies `wire.Renderer`; knows of each prompt which messages, tools and options it was made of."""

    def __init__(self, folder: Path) -> None:
        self._inner = AutoRenderer(folder)
        self.text = self._inner.text
        self._asked: dict[bytes, tuple[list[Json], list[Json], Json]] = {}

    def asked(self, prompt_ids: Sequence[int]) -> tuple[list[Json], list[Json], Json]:
        """Raises `KeyError` for a prompt that was not made here."""
        return self._asked[_key(prompt_ids)]

    def anew(self, messages: Sequence[Json], tools: Sequence[Json], options: Json) -> list[int]:
        """The ids of a prompt where the whole history is rendered, as engines do."""
        return list(self._inner.render(messages, tools, options))

    @property
    def joint(self) -> str:
        return str(self._inner.joint)

    def reads(self, *, calls: bool) -> bool:
        return bool(self._inner.reads(calls=calls))

    def head(self, tools: Sequence[Json], options: Json) -> Json:
        return dict(self._inner.head(tools, options))

    def render(self, messages: Sequence[Json], tools: Sequence[Json], options: Json) -> list[int]:
        ids = list(self._inner.render(messages, tools, options))
        self._asked[_key(ids)] = list(messages), list(tools), dict(options)
        return ids

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        history: Sequence[Json],
        reply: Json,
        new: Sequence[Json],
        tools: Sequence[Json],
        options: Json,
        *,
        written: str = "",
    ) -> list[int] | Break:
        found = self._inner.extend(prompt_ids, completion_ids, history, reply, new, tools, options, written=written)
        if not isinstance(found, Break):
            self._asked[_key(found)] = [*history, reply, *new], list(tools), dict(options)
        return found

    def begin(
        self,
        prompt_ids: Sequence[int],
        kept: int,
        messages: Sequence[Json],
        begun: str,
        tools: Sequence[Json],
        options: Json,
    ) -> list[int] | None:
        found: list[int] | None = self._inner.begin(prompt_ids, kept, messages, begun, tools, options)
        if found is not None:
            said = [*messages, {"role": "assistant", "content": begun}]
            self._asked[_key(found)] = said, list(tools), dict(options)
        return found

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[Json], *, begun: str = "") -> ReplyParser:
        return self._inner.parser(prompt_ids, tools, begun=begun)


@lru_cache(maxsize=4)
def remembering(folder: Path) -> Remembering:
    """One for each folder: a gateway and an engine that name the same folder get the same one."""
    return Remembering(folder)


def _key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()


class ToolUsingEngine(TokenEngine):
    """Plays `turns` calls a task."""

    def __init__(
        self, folder: Path, *, turns: int = 2, odd_arguments: bool = False, thinking: bool = False, rich: bool = False
    ) -> None:
        """With `odd_arguments` it writes calls as no serialiser does, in pieces as no tokenizer would cut them, so that
        a history that is rendered anew differs from its tokens. With `thinking` it reasons before each answer."""
        super().__init__(remembering(folder))
        self._turns = turns
        self._odd = odd_arguments
        self._thinking = thinking
        self._rich = rich

    def choose(self, asked: Json, chat: bool) -> Ids:
        said = asked
        if not chat:
            messages, tools, _ = self.renderer.asked(self.prompt_ids)
            said = {**asked, "messages": messages, "tools": tools}
        encode = self.renderer.text.encode
        thought = encode("<think>\nOne step.\n</think>\n\n") if self._thinking else []
        return self._stopped([*thought, *self._answer(said), *encode(END)], asked.get("stop") or ())

    def _stopped(self, ids: Ids, stop: str | Sequence[str]) -> Ids:
        """As engines do it: up to the token that completes a stop string."""
        strings = [stop] if isinstance(stop, str) else stop
        for end in range(1, len(ids)):
            text = self.renderer.text.decode(ids[:end])
            if any(one in text for one in strings):
                return ids[:end]
        return ids

    def _answer(self, said: Json) -> Ids:
        first = decide(said, self._turns)
        if not self._rich or isinstance(first, Say):
            return self._spell(first)
        encode = self.renderer.text.encode
        told = [*said["messages"], {"role": "tool", "content": "None yet."}]
        second = decide({**said, "messages": told}, self._turns)
        another = [] if isinstance(second, Say) or second == first else [*encode("\n"), *self._spell(second)]
        return [*encode("Let me see.\n\n"), *self._spell(first), *another]

    def _spell(self, decision: Say | Use) -> Ids:
        encode = self.renderer.text.encode
        if isinstance(decision, Say):
            return encode(decision.text)
        if not self._odd:
            return encode(render_call(decision.tool, json.dumps(decision.arguments)))
        written = render_call(decision.tool, write_oddly(decision.arguments))
        inside = written.removeprefix(CALL).removesuffix(CALL_END)
        pieces = [inside[at : at + 3] for at in range(0, len(inside), 3)]
        return [i for piece in (CALL, *pieces, CALL_END) for i in encode(piece)]


def write_oddly(value: Any) -> str:
    """JSON that means `value`, with the spaces, the escapes and the order of keys that no serialiser writes."""
    if isinstance(value, dict):
        entries = [f"{_escaped(key)} :  {write_oddly(one)}" for key, one in reversed(value.items())]
        return "{ " + " ,  ".join(entries) + "}"
    if isinstance(value, list):
        return "[" + " ,".join(write_oddly(one) for one in value) + " ]"
    return _escaped(value) if isinstance(value, str) else json.dumps(value)


def _escaped(text: str) -> str:
    """Every third character as an escape."""
    written = (
        f"\\u{ord(one):04x}" if at % 3 == 1 and ord(one) < 0x10000 else json.dumps(one)[1:-1]
        for at, one in enumerate(text)
    )
    return '"' + "".join(written) + '"'
