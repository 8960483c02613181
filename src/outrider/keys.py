"""Attempt keys: shown to one harness, stored as a hash alone."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "ork-"


def new_key() -> str:
    """A fresh attempt key, 192 random bits."""
    return PREFIX + secrets.token_urlsafe(24)


def hash_key(key: str) -> str:
    """SHA-256 of a key, in hex: what the store holds."""
    return hashlib.sha256(key.encode()).hexdigest()
