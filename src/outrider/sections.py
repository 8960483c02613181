"""Trees of typed sections: what their fields are, and words for what is wrong with a tree of plain values."""

from __future__ import annotations

import difflib
import tomllib
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from outrider.errors import ConfigError


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


def override(tree: dict[str, Any], text: str) -> None:
    """Put ``section.key=value`` over `tree`. Raises `ConfigError`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"-o {text!r}: write it as section.key=value, for example train.lr=1e-5.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string, so that nobody has to quote twice in a shell
    node = tree
    *sections, leaf = key.strip().split(".")
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"-o {text!r}: {section!r} is a value, not a section.")
    node[leaf] = parsed


def fields(section: type[msgspec.Struct]) -> list[tuple[str, Any, Meta, Any]]:
    """``(name, type, meta, default)`` of each field; the default is `msgspec.NODEFAULT` where it must be given."""
    hints = get_type_hints(section, include_extras=True)
    found = []
    for info in msgspec.structs.fields(section):
        kind, meta = (
            get_args(hints[info.name])[:2] if get_origin(hints[info.name]) is Annotated else (info.type, Meta())
        )
        default = info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        found.append((info.name, kind, meta, default))
    return found


def section_in(kind: Any) -> type[Section] | None:
    """The section that a field of type `kind` holds, one or a list of them."""
    kind = next(iter(get_args(kind)), None) if get_origin(kind) is tuple else kind
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def check_keys(tree: Any, section: type[msgspec.Struct], root: type[msgspec.Struct], where: str = "") -> None:
    """Raise on a key that `section` lacks, with the nearest one that exists anywhere in `root`."""
    if not isinstance(tree, dict):
        return
    known = {name: kind for name, kind, _, _ in fields(section)}
    for key, value in tree.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            elsewhere = [path for path in _all_keys(root, "") if path.rpartition(".")[2] == key]
            hint = f" Did you mean {where}{near[0]}?" if near else f" Did you mean {elsewhere[0]}?" if elsewhere else ""
            raise ConfigError(f"{where}{key}: there is no such key.{hint}")
        nested = section_in(known[key])
        if nested is not None and isinstance(value, list):
            for place, item in enumerate(value):
                check_keys(item, nested, root, f"{where}{key}[{place}].")
        elif nested is not None:
            check_keys(value, nested, root, f"{where}{key}.")


def _all_keys(section: type[msgspec.Struct], where: str) -> list[str]:
    keys = []
    for name, kind, _, _ in fields(section):
        keys.append(f"{where}{name}")
        nested = section_in(kind)
        if nested is not None:
            keys += _all_keys(nested, f"{where}{name}.")
    return keys


def readable(message: str, root: type[msgspec.Struct]) -> str:
    """Turn msgspec's ``Expected `int`, got `str` - at `$.train.steps``` into ``train.steps: expected int, got str``."""
    text, _, path = message.partition(" - at ")
    path = path.strip("`").removeprefix("$.").removeprefix("$") or "run file"
    text = text.replace("`", "")
    choices = _choices(root, path)
    if text.startswith("Invalid enum value") and choices:
        value = text.removeprefix("Invalid enum value").strip().strip("'")
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{path}: {value!r} is none of {', '.join(choices)}.{hint}"
    if text == "Expected array, got str":
        return f'{path}: expected a list, got text; write it as ["one", "two"].'
    return f"{path}: {text[:1].lower()}{text[1:]}."


def _choices(section: type[msgspec.Struct], path: str) -> list[str]:
    """The words that the field at `path` takes; empty where it is no choice."""
    kind: Any = section
    for name in path.split("."):
        inner = section_in(kind)
        found = {} if inner is None else {field: kind for field, kind, _, _ in fields(inner)}
        kind = found.get(name.partition("[")[0])
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
