"""A store by its URL: ``sqlite:///PATH`` or ``postgresql://user:password@host/database``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from outrider.errors import ConfigError
from outrider.protocols import Store
from outrider.registry import resolve

FORMS = "sqlite:///PATH or postgresql://user:password@host/database"


def open_store(url: str, *, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> Store:
    """Open the store that `url` names; its scheme is the short name of a store plug-in.

    ``sqlite:///runs/store.sqlite3`` is relative, ``sqlite:////srv/store.sqlite3`` absolute. A plug-in of somebody
    else's is called with the whole URL and `synchronous`. Raises `ConfigError` on a URL that is none, `SetupError`
    where an extra is missing, `StoreError` where the store can't be opened.
    """
    scheme, rest = check_url(url)
    if scheme == "sqlite":
        return _sqlite(url, rest, synchronous)
    store: Store = resolve("store", scheme, field="store")(url, synchronous=synchronous)
    return store


def check_url(url: str, *, field: str = "store") -> tuple[str, str]:
    """Scheme and rest of a store's URL. Raises `ConfigError` on what is none."""
    scheme, found, rest = url.partition("://")
    if not found or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_+-]*", scheme):
        raise ConfigError(f"{field}: {url!r} is no store URL; write {FORMS}.{_meant(url)}")
    return scheme, rest


def _meant(path: str) -> str:
    """What to write for a file or a run folder that was named as such."""
    for file in (Path(path), Path(path) / "store.sqlite3"):
        if file.is_file():
            return f" Did you mean sqlite:///{file}?"
    return ""


def _sqlite(url: str, rest: str, synchronous: Literal["FULL", "NORMAL"]) -> Store:
    if not rest.startswith("/"):
        raise ConfigError(f"store: {url!r} names a host, which SQLite has none of; write sqlite:///{rest}.")
    path = rest[1:]
    if not path.strip("/"):
        raise ConfigError(f"store: {url!r} names no file; write sqlite:///PATH.")
    store: Store = resolve("store", "sqlite", field="store")(Path(path), synchronous=synchronous)
    return store
