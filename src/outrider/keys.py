"""Secrets: attempt keys, shown to one harness and stored as a hash alone, and the password in a store's URL."""

from __future__ import annotations

import hashlib
import secrets
from urllib.parse import unquote

PREFIX = "ork-"


def new_key() -> str:
    """A fresh attempt key, 192 random bits."""
    return PREFIX + secrets.token_urlsafe(24)


def hash_key(key: str) -> str:
    """SHA-256 of a key, in hex: what the store holds."""
    return hashlib.sha256(key.encode()).hexdigest()


def split_password(url: str) -> tuple[str, str]:
    """A store's URL without its password, and the password; the same URL and nothing where it has none."""
    head, _, query = url.partition("?")
    scheme, colon, rest = head.partition("://")
    authority, slash, path = rest.partition("/")
    login, at, host = authority.rpartition("@")
    user, _, password = login.partition(":")
    fields = query.split("&") if query else []
    named = [field.partition("=")[2] for field in fields if field.startswith("password=")]
    found = unquote(named[-1] if named else password)
    if not found:
        return url, ""
    kept = "&".join(field for field in fields if not field.startswith("password="))
    return f"{scheme}{colon}{user}{at}{host}{slash}{path}{'?' if kept else ''}{kept}", found
