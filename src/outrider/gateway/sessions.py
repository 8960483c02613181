"""Keys: which attempt a call belongs to, and what is kept of it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from dataclasses import dataclass, field

from outrider.errors import RequestError
from outrider.gateway.exchange import Exchange
from outrider.keys import PREFIX, hash_key
from outrider.protocols import Store
from outrider.types import Json, Mode, Session

TRAJECTORY_HEADER = b"x-outrider-trajectory"
KEY_HEADERS = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key")  # of several attempt keys, the first
CREDENTIAL_HEADERS = frozenset({*KEY_HEADERS, b"cookie"})
# Names of production trajectories come from agents. They get a space of their own, so that none can be an attempt's.
TRAJECTORY_PREFIX = "trajectory:"
_TRAJECTORY = re.compile(rb"[A-Za-z0-9._:/-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a caller may do: one attempt's model endpoints, or un-keyed traffic under the gateway's own mode."""

    mode: Mode
    attempt_id: str = ""
    """Attempt or production trajectory that a recorded call goes under; empty where its messages have to tell."""
    overrides: Json = field(default_factory=dict)
    """Sampling parameters put over the agent's."""
    keyed: bool = False
    owner: str = ""
    """Who calls: the attempt, or whoever holds a provider key. Nobody sees another owner's earlier answers."""
    credentials: tuple[str, ...] = field(default=(), repr=False)
    """Provider keys that came along. They go upstream, and are never stored."""

    @property
    def ours(self) -> bool:
        """The upstream samples from the policy, and tokens are kept."""
        return self.mode in (Mode.TRAIN, Mode.EVAL)


class Sessions:
    """Reads the store at every call, so that an attempt that ended is refused at once, whichever gateway ended it."""

    def __init__(self, store: Store, mode: Mode, *, takes_unkeyed: bool = True) -> None:
        self._store = store
        self._mode = mode
        self._takes_unkeyed = takes_unkeyed

    async def access(self, exchange: Exchange, path_key: str | None) -> Access:
        """Raises `RequestError` with status 401 or 403, and `StoreError`."""
        key = path_key if path_key is not None else _attempt_key(exchange)
        credentials = _credentials(exchange)
        if key is None:
            return self._unkeyed(exchange, credentials)
        session = await self._session(key)
        if session.sealed:
            raise RequestError("The attempt of this key has ended.", status=403, code="attempt_ended")
        return Access(
            mode=session.mode,
            attempt_id=session.attempt_id,
            overrides=session.sampling,
            keyed=True,
            owner=owner_of(session.attempt_id),
            credentials=credentials,
        )

    async def for_feedback(self, exchange: Exchange, path_key: str | None) -> Session:
        """The session whose attempt may be given feedback on, also once it has ended. Raises as `access`."""
        key = path_key if path_key is not None else _attempt_key(exchange)
        if key is None:
            raise RequestError("Feedback needs an attempt key.", status=401, code="missing_attempt_key")
        session = await self._session(key)
        if not session.allow_feedback:
            raise RequestError("This key takes no feedback.", status=403, code="feedback_not_allowed")
        return session

    async def _session(self, key: str) -> Session:
        digest = hash_key(key)
        # A local file is read in less time than another thread takes to begin; a server is waited for, and not by all.
        session = (
            await asyncio.to_thread(self._store.session, digest) if self._store.remote else self._store.session(digest)
        )
        if session is None:
            raise RequestError("The attempt key is not known.", status=401, code="invalid_api_key")
        if session.expires_at is not None and time.time() > session.expires_at:
            raise RequestError("The attempt key has expired.", status=401, code="key_expired")
        return session

    def _unkeyed(self, exchange: Exchange, credentials: tuple[str, ...]) -> Access:
        if self._mode in (Mode.TRAIN, Mode.EVAL):
            raise RequestError(
                "This gateway takes calls with an attempt key only.", status=401, code="missing_attempt_key"
            )
        if not self._takes_unkeyed:
            raise RequestError(
                "This gateway takes calls with an attempt key only: other machines reach it, and its upstream may ask "
                "for no key. --unkeyed allow lets others in.",
                status=401,
                code="missing_attempt_key",
            )
        given = exchange.header(TRAJECTORY_HEADER)
        if given is not None and not _TRAJECTORY.fullmatch(given):
            raise RequestError("x-outrider-trajectory: up to 200 of A-Z a-z 0-9 . _ : / - are allowed.")
        return Access(
            mode=self._mode,
            attempt_id=TRAJECTORY_PREFIX + given.decode() if given else "",
            owner="key:" + hashlib.sha256("\0".join(credentials).encode()).hexdigest(),
            credentials=credentials,
        )


def owner_of(attempt_id: str) -> str:
    """`Access.owner` of the calls on an attempt's key."""
    return f"attempt:{attempt_id}"


def is_attempt_key(value: bytes) -> bool:
    """True of a header value that holds one of our keys, which no upstream should see."""
    return token_of(value).startswith(PREFIX.encode())


def _attempt_key(exchange: Exchange) -> str | None:
    for name in KEY_HEADERS:
        value = exchange.header(name)
        if value is not None and is_attempt_key(value):
            return token_of(value).decode("latin-1")
    if PREFIX.encode() in exchange.query:
        raise RequestError(
            "An attempt key stands in the path, as /s/KEY/v1/..., or in the header Authorization; not in the query, "
            "which would go upstream.",
            status=401,
            code="invalid_api_key",
        )
    return None


def _credentials(exchange: Exchange) -> tuple[str, ...]:
    """The provider keys in a request's headers."""
    return tuple(
        token_of(value).decode("latin-1")
        for name, value in exchange.headers
        if name in CREDENTIAL_HEADERS and not is_attempt_key(value)
    )


def token_of(value: bytes) -> bytes:
    """The key in a header's value, with or without ``Bearer``; an attempt key behind any scheme."""
    scheme, _, rest = value.strip().replace(b"\t", b" ").partition(b" ")
    rest = rest.strip()
    return rest if scheme.lower() == b"bearer" or rest.startswith(PREFIX.encode()) else value.strip()
