"""Renders any model folder that has a ``tokenizer.json`` and a chat template, and extends branches by `Bridge`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import RequestError
from outrider.renderers.bridge import Bridge
from outrider.renderers.chat_template import ChatTemplate, TemplateRefused
from outrider.renderers.encoding import TokenText
from outrider.renderers.reply import THINK, RestOfReply, TaggedReply, is_plain
from outrider.renderers.shape import STUB_TOOL, mapping, probe, shape, shape_tools, stub_call
from outrider.types import Break, Json
from outrider.wire import ReplyParser

_TAIL = 16  # tokens: an opening that ends in ``<think>`` and blank space is shorter


class TemplateRenderer:
    """Satisfies `wire.Renderer`."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError`."""
        self.template = ChatTemplate(folder)
        self.text = TokenText(folder, template=self.template.source)
        self.traits = probe(self.template)
        self._bridge = Bridge(self.template, self.text, self.traits)
        source = self.template.source
        self._bare_calls = "<tool_call>" not in source and '"parameters"' in source and '"name"' in source
        self._reads_text = self._comes_back({"role": "assistant", "content": "answer"})
        self._reads_calls = self._comes_back(
            {"role": "assistant", "content": "", "tool_calls": [stub_call("stub", {"k": "v"})]}
        )

    @property
    def joint(self) -> str:
        return self.template.joint

    def reads(self, *, calls: bool) -> bool:
        return self._reads_text and (self._reads_calls or not calls)

    def head(self, tools: Sequence[Json], options: Json) -> Json:
        named = {name: value for name, value in options.items() if name in self.template.source}
        return {"tools": list(tools) if self.traits.tools else [], "options": named}

    def render(self, messages: Sequence[Json], tools: Sequence[Json], options: Json) -> list[int]:
        shaped = shape(messages, self.text, self.traits)
        try:
            text = self.template.render(shaped, shape_tools(tools, self.text), options, generate=True)
        except TemplateRefused as error:
            raise RequestError(f"messages: {error}", param="messages") from error
        return self.text.encode(text)

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
        suffix = self._bridge.suffix(history, reply, new, tools, options)
        if isinstance(suffix, Break):
            return suffix
        ids = [*prompt_ids, *completion_ids]
        if suffix.close is None:
            return Break.HISTORY_REWRITTEN if written else ids + self.text.encode(suffix.text)
        # Encoded behind the token it follows: some tokenizers begin a text in another way than they go on.
        close = self.text.decode([suffix.close])
        if written:
            if completion_ids and completion_ids[-1] == suffix.close:
                return Break.HISTORY_REWRITTEN  # the model had ended its turn
            tail = self.text.encode(close + self.text.guard(written) + close + suffix.text)
            return ids + tail[1:] if tail[:1] == [suffix.close] else Break.UNKNOWN
        tail = self.text.encode(close + suffix.text)
        if tail[:1] != [suffix.close]:
            return Break.UNKNOWN
        return ids + (tail[1:] if completion_ids and completion_ids[-1] == suffix.close else tail)

    def begin(
        self,
        prompt_ids: Sequence[int],
        kept: int,
        messages: Sequence[Json],
        begun: str,
        tools: Sequence[Json],
        options: Json,
    ) -> list[int] | None:
        opening = self._bridge.opening(messages, begun, tools, options)
        marker = next((at for at in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[at] in self.text.special_ids), -1)
        if opening is None or marker < kept or not is_plain(self._reply(tools), begun, self.text.encode_said(begun)):
            return None
        # Encoded with the opening of the answer, behind its last control token, as extensions are.
        head, tail = list(prompt_ids[:marker]), self.text.decode(prompt_ids[marker:])
        ids = self.text.encode(tail + opening.between + self.text.guard(begun, only_control=True))
        return head + ids if opening.text.endswith(tail) and ids[0] == prompt_ids[marker] else None

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[Json], *, begun: str = "") -> ReplyParser:
        if begun:
            return RestOfReply(self._reply(tools), begun, self.text.encode_said(begun))
        return self._reply(tools, thinking=self.text.decode(prompt_ids[-_TAIL:]).rstrip().endswith(THINK))

    def _reply(self, tools: Sequence[Json], *, thinking: bool = False) -> TaggedReply:
        names = frozenset(str((tool.get("function") or {}).get("name")) for tool in tools)
        return TaggedReply(self.text, thinking=thinking, tools=names, bare_calls=self._bare_calls)

    def _comes_back(self, said: Json) -> bool:
        """The parser makes `said` again of what the template writes for it. True where that can't be tried."""
        asked: list[Json] = [{"role": "user", "content": "question"}]
        tools = [STUB_TOOL] if said.get("tool_calls") else []
        before, opened, after = (
            self._text_of(messages, tools, generate=generate)
            for messages, generate in ((asked, False), (asked, True), ([*asked, said], False))
        )
        opening, written = opened.removeprefix(before), after.removeprefix(before)
        # A prompt may open a thought that a history does not have.
        opening = opening if written.startswith(opening) else opening.partition(THINK)[0]
        if not opening or not written.startswith(opening):
            return True
        parser = self.parser(self.text.encode(opening), tools)
        parts = [parser.feed(self.text.encode(written.removeprefix(opening))), parser.finish()]
        calls = [(call.name, mapping(call.arguments)) for part in parts for call in part.calls]
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in said.get("tool_calls", ())]
        return "".join(part.content for part in parts).strip() == said["content"] and calls == wanted

    def _text_of(self, messages: Sequence[Json], tools: Sequence[Json], *, generate: bool) -> str:
        try:
            return self.template.render(shape(messages, self.text, self.traits), tools, {}, generate=generate)
        except TemplateRefused:
            return ""
