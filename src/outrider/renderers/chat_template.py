"""The Jinja chat template of a model folder, in the environment that templates are written for."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError
from outrider.types import Json


class TemplateRefused(Exception):
    """The template raised; the message is for the agent."""


class ChatTemplate:
    """Thread-safe: nothing changes after the start."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` where the folder has no template, or one that is no Jinja."""
        if not folder.is_dir():
            raise ConfigError(f"tokenizer: there is no folder {str(folder)!r}; give the policy's model folder.")
        config = _read_json(folder / "tokenizer_config.json")
        sources = _sources(folder, config)
        if "default" not in sources:
            raise ConfigError(f"tokenizer: {str(folder)!r} has no chat template, which is needed to render prompts.")
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"tokenizer: the chat template in {str(folder)!r} cannot be read: {error}") from error
        self.source = "\n".join(sources.values())
        self._tokens = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
        self.joint = self._find_joint()
        """What stands between text parts of one message: the template's own, or what engines put there for those that
        take a string."""

    def render(self, messages: Sequence[Json], tools: Sequence[Json] | None, options: Json, *, generate: bool) -> str:
        """The conversation as text; `generate` adds the opening of an answer. Raises `TemplateRefused`."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables = {**self._tokens, **options, "add_generation_prompt": generate}
        try:
            text: str = self._templates[name].render(
                messages=list(messages), tools=list(tools) if tools else None, documents=None, **variables
            )
        except Exception as error:  # a template is a program of the model's author: anything can come out of it
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error
        return text

    def _find_joint(self) -> str:
        one, two = "part" + secrets.token_hex(8), "part" + secrets.token_hex(8)
        parts = [{"type": "text", "text": one}, {"type": "text", "text": two}]
        try:
            text = self.render([{"role": "user", "content": parts}], None, {}, generate=False)
        except TemplateRefused:
            return "\n"
        _, found, rest = text.partition(one)
        between, found_too, _ = rest.partition(two)
        return between if found and found_too and not between.strip() else "\n"


def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = _strftime_now
    return made


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the model's own text for trainers; it renders as its inside."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes < > & ' for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _sources(folder: Path, config: Json) -> dict[str, str]:
    """Templates by name, as the three layouts of model folders have them."""
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif isinstance(inline, list):
        found |= {entry["name"]: entry["template"] for entry in inline}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[extra.stem] = extra.read_text(encoding="utf-8")
    return found


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(file: Path) -> Json:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"tokenizer: {str(file)!r} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
