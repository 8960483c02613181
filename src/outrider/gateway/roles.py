"""Who may use ``/admin``: an admin, a trainer, a grader, a reader, each with keys of their own.

Keys are compared as SHA-256 in constant time, and nothing else of them is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from enum import StrEnum

from outrider.errors import ConfigError, RequestError

KEY_FORM = "The key itself or sha256:HEX of it; several are separated by commas"
MIN_LENGTH = 20
MIN_LETTERS = 8  # different ones
_SHA256 = "sha256:"
_HEX = re.compile(r"[0-9a-fA-F]{64}")


class Role(StrEnum):
    ADMIN = "admin"  # everything
    TRAINER = "trainer"  # pause, resume, rewards, reading
    GRADER = "grader"  # rewards, reading
    READ = "read"


TRAIN = frozenset({Role.ADMIN, Role.TRAINER})
GRADE = TRAIN | {Role.GRADER}
READ = GRADE | {Role.READ}


class Roles:
    """Raises `ConfigError` for a key that can't be one."""

    def __init__(
        self, *, admin: str, trainer: str = "", grader: str = "", read: str = "", guessable_by: str = ""
    ) -> None:
        """`guessable_by` says who could try keys, if anybody could: then they must not be short."""
        given = {Role.ADMIN: admin, Role.TRAINER: trainer, Role.GRADER: grader, Role.READ: read}
        self._digests = [
            (digest, role) for role, text in given.items() for digest in _digests(text, role, guessable_by)
        ]
        if len({digest for digest, _ in self._digests}) != len(self._digests):
            raise ConfigError("admin_key, trainer_key, grader_key, read_key: a key may stand in one of them only.")

    @property
    def any(self) -> bool:
        """There is a key for somebody."""
        return bool(self._digests)

    def allow(self, key: bytes, roles: frozenset[Role]) -> Role:
        """The role of `key`, if it is one of `roles`. Raises `RequestError` with status 401 or 403."""
        given = hashlib.sha256(key).digest()
        found = None
        for digest, role in self._digests:  # all of them, so that the time tells nothing
            if hmac.compare_digest(given, digest):
                found = role
        if found is None or not key:
            raise RequestError("This needs an admin key.", status=401, code="invalid_admin_key")
        if found not in roles:
            raise RequestError(f"A {found} key does not open this.", status=403, code="wrong_role")
        return found

    def guard(self, keys: Sequence[str]) -> None:
        """Raises `RequestError` where one of `keys`, which came with a model call, opens ``/admin``: it must not go
        upstream."""
        for key in keys if self._digests else ():
            given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
            if any([hmac.compare_digest(given, digest) for digest, _ in self._digests]):
                raise RequestError(
                    "This key is for /admin. A model call takes an attempt key, or the provider's own.",
                    status=401,
                    code="invalid_api_key",
                )


def _digests(text: str, role: Role, guessable_by: str) -> list[bytes]:
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        if not part.startswith(_SHA256):
            if guessable_by and (len(part) < MIN_LENGTH or len(set(part)) < MIN_LETTERS):
                raise ConfigError(
                    f"{role}_key: this one can be guessed, and {guessable_by}. Take at least {MIN_LENGTH} random "
                    "letters and digits, for example those of: openssl rand -hex 24"
                )
            found.append(hashlib.sha256(part.encode()).digest())
        elif _HEX.fullmatch(part.removeprefix(_SHA256)):
            found.append(bytes.fromhex(part.removeprefix(_SHA256)))
        else:
            raise ConfigError(f"{role}_key: after sha256: come 64 hexadecimal digits.")
    return found
