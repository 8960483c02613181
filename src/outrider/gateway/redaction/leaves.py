"""The texts of a JSON tree, where they stand, and which of them are pieces of one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Strings that come in pieces, and what tells one run of pieces from another.
_PIECES = frozenset(
    {"content", "text", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "partial_json", "delta"}
)
_INDEXES = ("index", "output_index", "content_index", "summary_index", "item_id", "type")
_INDEX = (int, str)
_CONTAINER = (dict, list)
SHORTEST_SECRET = 12  # names below it are none, and most names are


@dataclass(slots=True)
class Leaf:
    """A string and where it stands."""

    container: Any
    key: Any
    text: str
    run: tuple[Any, ...] | None
    """Leaves of one run are pieces of one text."""
    is_name: bool = False
    """It is the key itself, of an object."""


def leaves_of(value: Any, path: tuple[Any, ...]) -> Iterator[Leaf]:
    """Every string in a tree, with what run of pieces it belongs to."""
    if isinstance(value, dict):
        indexes = [value[name] for name in _INDEXES if name in value]
        if indexes:
            path = (*path, *(index for index in indexes if isinstance(index, _INDEX)))
        for name, child in value.items():
            if len(name) >= SHORTEST_SECRET:
                yield Leaf(value, name, name, None, is_name=True)
            if isinstance(child, str):
                yield Leaf(value, name, child, (*path, name) if name in _PIECES else None)
            elif isinstance(child, _CONTAINER):
                yield from leaves_of(child, (*path, name))
    else:
        for number, child in enumerate(value):
            if isinstance(child, str):
                yield Leaf(value, number, child, None)
            elif isinstance(child, _CONTAINER):
                yield from leaves_of(child, path if isinstance(child, dict) and "index" in child else (*path, number))


def put_back(leaves: list[Leaf]) -> None:
    for leaf in leaves:
        if not leaf.is_name:
            leaf.container[leaf.key] = leaf.text
    for leaf in leaves:
        if leaf.is_name and leaf.text != leaf.key:
            leaf.container[leaf.text] = leaf.container.pop(leaf.key)
