"""Functions by name: one of a table, or anybody's as ``module:function``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar, cast

from outrider.errors import ConfigError
from outrider.registry import load_attr

_T = TypeVar("_T")


def find(table: Mapping[str, _T], name: str, field: str) -> _T:
    """What `name` stands for in `table`, or beyond it. Raises `ConfigError`, with the `field` of the run file."""
    if name in table:
        return table[name]
    if ":" in name:
        found = load_attr(name, field=field)
        if not callable(found):
            raise ConfigError(f"{field}: {name} is no function.")
        return cast(_T, found)
    near = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{field}: there is no {name!r}.{hint} Known: {', '.join(sorted(table))}; or module:function.")
