"""Earlier responses, for clients that name the last one (``previous_response_id``) instead of sending it again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from outrider.types import Json

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Json]).decode


class ResponseHistory(Protocol):
    """What one client may look up: never another one's responses."""

    def items(self, response_id: str) -> list[Json] | None:
        """The conversation up to and with that response, as input items; None where it is unknown."""

    def keep(self, response_id: str, items: Sequence[Json]) -> None: ...


class RecentResponses:
    """Keeps the newest responses of all clients in memory, up to `max_bytes` of JSON. Thread-safe.

    A conversation that would take a quarter of that alone is not kept: it would push out those of many others.
    """

    def __init__(self, *, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, owner: str) -> ResponseHistory:
        """The responses of one owner, such as an attempt."""
        return _OwnResponses(self, owner)

    def has(self, owner: str, response_id: str) -> bool:
        return (owner, response_id) in self._kept

    def get(self, owner: str, response_id: str) -> list[Json] | None:
        with self._lock:
            kept = self._kept.get((owner, response_id))
            if kept is None:
                return None
            self._kept.move_to_end((owner, response_id))
        return _decode(kept)

    def put(self, owner: str, response_id: str, items: Sequence[Json]) -> None:
        data = _encode(list(items))
        if len(data) > self._max_bytes // 4:
            return
        with self._lock:
            self._bytes += len(data) - len(self._kept.pop((owner, response_id), b""))
            self._kept[owner, response_id] = data
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._kept.popitem(last=False)[1])


class _OwnResponses:
    def __init__(self, all: RecentResponses, owner: str) -> None:
        self._all = all
        self._owner = owner

    def items(self, response_id: str) -> list[Json] | None:
        return self._all.get(self._owner, response_id)

    def keep(self, response_id: str, items: Sequence[Json]) -> None:
        self._all.put(self._owner, response_id, items)
