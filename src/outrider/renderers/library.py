"""Model families that the ``renderers`` library knows, as a renderer: its own prompts, bridges and parsers.

The family is named by the library, as ``qwen3`` or ``glm-4.5``. For a folder, `find_family` proposes one by the model's
architecture and takes it only where it renders as the folder's own chat template does: a fine-tune may have another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError, RequestError
from outrider.renderers.encoding import TokenText
from outrider.renderers.reply import RestOfReply, is_plain, read_calls
from outrider.renderers.shape import Traits, shape, shape_tools, stub_call
from outrider.renderers.template import TemplateRenderer
from outrider.types import Break, Json
from outrider.wire import ParsedCall, ReplyDelta, ReplyParser

# Architecture, as config.json has it -> families that may be meant.
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6"),
    "llama": ("llama-3",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "gpt_oss": ("gpt-oss",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra"),
}
_PARAMETERS: Json = {
    "type": "object",
    "properties": {"k": {"type": "string", "description": "a key"}, "n": {"type": "integer"}},
    "required": ["k"],
}
_ALL = Traits(calls=True, results=True, late_system=True, tools=True, reasoning=True)
_FIRST_LOOK, _GROWTH = 8, 1.1  # an answer is parsed again when it has grown by a tenth, so that the cost stays linear


class LibraryRenderer:
    """Satisfies `wire.Renderer`. What the library can't bridge is left to the folder's own template."""

    def __init__(self, folder: Path, family: str = "", generic: TemplateRenderer | None = None) -> None:
        """`generic` is the folder's own, where it was read already. Raises `ConfigError`."""
        self._generic = generic or TemplateRenderer(folder)
        self.text = self._generic.text
        self._tokenizer = _Tokenizer(folder, self.text)
        self.family = family or find_family(folder, self._generic)
        if not self.family:
            raise ConfigError(
                f"renderer: the library knows no family that writes prompts as {str(folder)!r} does. Use renderer "
                "template, which takes any chat template."
            )
        plain = _create(self._tokenizer, self.family, {})
        self._fields = frozenset(plain.config.template_field_names())
        self._made: dict[str, Any] = {"{}": plain}

    @property
    def joint(self) -> str:
        return self._generic.joint

    def reads(self, *, calls: bool) -> bool:
        return True  # each family comes with a parser of its own

    def head(self, tools: Sequence[Json], options: Json) -> Json:
        return {"tools": list(tools), "options": self._known(options)}

    def render(self, messages: Sequence[Json], tools: Sequence[Json], options: Json) -> list[int]:
        shaped, offered = shape(messages, self.text, _ALL), shape_tools(tools, self.text)
        try:
            found = self._of(options).render_ids(shaped, tools=offered, add_generation_prompt=True)
        except RequestError:
            raise
        except Exception as error:  # as with templates: anything can come out of a message that it does not expect
            raise RequestError(f"messages: the chat format refused them: {error}", param="messages") from error
        return list(found)

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
        if written:
            return self._generic.extend(
                prompt_ids, completion_ids, history, reply, new, tools, options, written=written
            )
        before = [*prompt_ids, *completion_ids]
        shaped, offered = shape(new, self.text, _ALL), shape_tools(tools, self.text)
        try:
            found = self._of(options).bridge_to_next_turn(list(prompt_ids), list(completion_ids), shaped, tools=offered)
        except Exception:  # a bridge that fails proves nothing
            found = None
        if found is not None and list(found.token_ids[: len(before)]) == before:
            return list(found.token_ids)
        return self._generic.extend(prompt_ids, completion_ids, history, reply, new, tools, options)

    def begin(
        self,
        prompt_ids: Sequence[int],
        kept: int,
        messages: Sequence[Json],
        begun: str,
        tools: Sequence[Json],
        options: Json,
    ) -> list[int] | None:
        found = self._generic.begin(prompt_ids, kept, messages, begun, tools, options)
        plain = found is not None and is_plain(self.parser(found, tools), begun, self.text.encode_said(begun))
        return found if plain else None

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[Json], *, begun: str = "") -> ReplyParser:
        made = LibraryReply(self._of({}), self.text, list(prompt_ids), list(tools))
        return RestOfReply(made, begun, self.text.encode_said(begun)) if begun else made

    def _known(self, options: Json) -> Json:
        return {name: value for name, value in options.items() if name in self._fields}

    def _of(self, options: Json) -> Any:
        """The library's renderer with these template options."""
        known = self._known(options)
        key = json.dumps(known, sort_keys=True, default=repr)
        made = self._made.get(key)
        if made is None:
            try:
                made = self._made[key] = _create(self._tokenizer, self.family, known)
            except ConfigError as error:
                raise RequestError(f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error
        return made


class AutoRenderer:
    """`LibraryRenderer` where the library is installed and knows the model's family, else `TemplateRenderer`."""

    def __new__(cls, folder: Path) -> Any:
        """Raises `ConfigError`."""
        generic = TemplateRenderer(folder)
        family = find_family(folder, generic)
        return LibraryRenderer(folder, family, generic) if family else generic


def find_family(folder: Path, generic: TemplateRenderer) -> str:
    """The family that renders as the folder's template does; empty where there is none, or no library."""
    config = folder / "config.json"
    kind = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None
    if kind == "llama" and "<|start_header_id|>" not in generic.text.added:
        return ""  # the architecture of many; importing the library takes seconds
    tokenizer = _Tokenizer(folder, generic.text)
    for family in FAMILIES.get(str(kind), ()):
        try:
            made = _create(tokenizer, family, {})
            if all(_same(made, generic, messages, tools) for messages, tools in _conversations()):
                return family
        except (ConfigError, RequestError, AssertionError, ValueError, KeyError, TypeError):
            continue
    return ""


def _same(made: Any, generic: TemplateRenderer, messages: list[Json], tools: list[Json]) -> bool:
    shaped = shape(messages, generic.text, _ALL)
    found = list(made.render_ids(shaped, tools=tools or None, add_generation_prompt=True))
    return found == generic.render(messages, tools, {})


def _conversations() -> list[tuple[list[Json], list[Json]]]:
    """What a format has to write the same for it to be taken for the template's."""
    question, answer, thought = "question", "answer", "thought"
    system: Json = {"role": "system", "content": "system"}
    user: Json = {"role": "user", "content": question}
    said: Json = {"role": "assistant", "content": answer}
    arguments = {"k": "v", "flag": True, "none": None, "n": 1}  # families differ in how they write these
    call: Json = {"role": "assistant", "content": "", "tool_calls": [stub_call("stub", arguments)]}
    function = {"name": "stub", "description": "what it does", "parameters": _PARAMETERS}
    tool: Json = {"type": "function", "function": function}
    result: Json = {"role": "tool", "tool_call_id": "call00000", "name": "stub", "content": "result"}
    thinking = {**call, "reasoning_content": thought}
    return [
        ([user], []),
        ([system, user, said, user], []),
        ([system, user], [tool]),
        ([user, call, result], [tool]),
        ([system, user, thinking, result, said, user], [tool]),
    ]


class LibraryReply:
    """Satisfies `wire.ReplyParser` by parsing what there is again and again; calls come at the end."""

    def __init__(self, renderer: Any, text: TokenText, prompt_ids: list[int], tools: list[Json]) -> None:
        self._renderer = renderer
        self._text = text
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._ids: list[int] = []
        self._look_at = _FIRST_LOOK
        self._reasoning = ""
        self._content = ""

    def feed(self, token_ids: Sequence[int]) -> ReplyDelta:
        self._ids += token_ids
        if len(self._ids) < self._look_at:
            return ReplyDelta()
        self._look_at = int(len(self._ids) * _GROWTH) + 1
        found = self._parse()
        # The end may still be a part of a character, or blank space before a call; all of it a call that is bare JSON.
        bare = bool(self._tools) and found.content.lstrip().startswith("{")
        return self._tell(_sure(found.reasoning_content), "" if bare else _sure(found.content), ())

    def finish(self) -> ReplyDelta:
        found = self._parse()
        content, calls = found.content, []
        if found.tool_calls and not self._tools:
            content += self._blank_before(found) + self._written(found.tool_calls[0], to_end=True)
        else:
            for attempt in found.tool_calls:
                if attempt.status == "ok" and attempt.name:
                    calls.append(ParsedCall(attempt.name, _arguments(attempt), attempt.id or ""))
                else:  # no call that an agent could make: it sees what was written
                    content += self._written(attempt)
        return self._tell(found.reasoning_content.rstrip(), content, tuple(calls))

    def _written(self, attempt: Any, *, to_end: bool = False) -> str:
        """What the model wrote as a call, markers and all, as far as the library knows where that was."""
        if attempt.token_span is None:
            return str(attempt.raw)
        start, end = attempt.token_span
        return self._show(self._ids[start : None if to_end else end])

    def _blank_before(self, found: Any) -> str:
        """The space between text and the first call, which the library drops."""
        span = found.tool_calls[0].token_span
        before = self._show(self._ids[: span[0]]) if span else ""
        return before[len(before.rstrip()) :] if found.content else ""

    def _show(self, token_ids: Sequence[int]) -> str:
        return self._text.decode([token for token in token_ids if token not in self._text.special_ids])

    def _parse(self) -> Any:
        found = self._renderer.parse_response(self._ids, tools=self._tools or None, prompt_ids=self._prompt_ids)
        found.reasoning_content = (found.reasoning_content or "").lstrip()  # only closed thoughts come without it
        return found

    def _tell(self, reasoning: str, content: str, calls: tuple[ParsedCall, ...]) -> ReplyDelta:
        new = ReplyDelta(
            reasoning=reasoning[len(self._reasoning) :] if reasoning.startswith(self._reasoning) else "",
            content=content[len(self._content) :] if content.startswith(self._content) else "",
            calls=calls,
        )
        self._reasoning += new.reasoning
        self._content += new.content
        return new


def _sure(text: str) -> str:
    return text.rstrip("\ufffd").rstrip()


def _arguments(attempt: Any) -> str:
    """As the model wrote them where the format is JSON, else as JSON of what was parsed."""
    start, end = attempt.raw.find("{"), attempt.raw.rfind("}")
    written = read_calls(attempt.raw[start : end + 1]) if 0 <= start < end else None
    if written and written[0].name == attempt.name:
        return written[0].arguments
    arguments = attempt.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _create(tokenizer: _Tokenizer, family: str, options: Json) -> Any:
    try:
        from renderers.base import create_renderer
        from renderers.configs import config_from_name
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"renderer: the library needs the package {error.name!r}. Install it: pip install 'outrider[render]'."
        ) from error
    try:
        return create_renderer(tokenizer, type(config_from_name(family))(**options))
    except Exception as error:  # no such family, options it does not take, a vocabulary without its tokens
        raise ConfigError(f"renderer: {family!r} can't be used with this model: {error}") from error


class _Tokenizer:
    """A `TokenText` as the library asks for a tokenizer."""

    def __init__(self, folder: Path, text: TokenText) -> None:
        self.name_or_path = folder.name
        self._text = text
        config = folder / "tokenizer_config.json"
        found = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        self.eos_token_id = self._id_of(found.get("eos_token"))
        self.bos_token_id = self._id_of(found.get("bos_token"))
        self.pad_token_id = self._id_of(found.get("pad_token"))
        self.unk_token_id = self._id_of(found.get("unk_token"))
        self.bos_token = found.get("bos_token")

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._text.encode(text)

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = [token for token in ids if token not in self._text.special_ids]
        return self._text.decode(ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._text.added.get(tokens, self._text.piece(tokens, self.unk_token_id))
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def _id_of(self, token: Any) -> int | None:
        spelling = token.get("content") if isinstance(token, dict) else token
        return self._text.added.get(spelling) if isinstance(spelling, str) else None
