"""Earlier responses, for clients that name the last one (``previous_response_id``) or items of them
(``item_reference``) instead of sending it again."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from outrider.types import Json

PREFIX = "resp_"  # of a response's id
REFERENCE = "item_reference"
# An item's id holds that of its response, without the prefix, and a number of two digits.
_ITEM = re.compile(r"(?:rs|msg|fc|ctc)_([A-Za-z0-9]+)[0-9a-f]{2}")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Json]).decode


class ResponseHistory(Protocol):
    """What one client may look up: never another one's responses."""

    def items(self, response_id: str) -> list[Json] | None:
        """The conversation up to and with that response, as input items; None where it is unknown."""

    def keep(self, response_id: str, items: Sequence[Json], previous: str = "") -> None:
        """`items` are the response's own and, where there is no `previous` response, those before it."""


class _Kept(NamedTuple):
    items: bytes
    previous: str


class RecentResponses:
    """Keeps the newest responses of all clients in memory, up to `max_bytes` of JSON. Thread-safe.

    Each is kept with what it added to the one before it, so a conversation takes its own length. A response that would
    take a quarter of the memory alone is not kept: it would push out those of many others.
    """

    def __init__(self, *, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def longest(self) -> int:
        """Bytes of JSON above which a response is not kept."""
        return self._max_bytes // 4

    def of(self, owner: str) -> ResponseHistory:
        """The responses of one owner, such as an attempt."""
        return _OwnResponses(self, owner)

    def has(self, owner: str, response_id: str) -> bool:
        """Whether `get` has it."""
        return self._chain(owner, response_id) is not None

    def get(self, owner: str, response_id: str) -> list[Json] | None:
        chain = self._chain(owner, response_id)
        return None if chain is None else [item for kept in reversed(chain) for item in _decode(kept.items)]

    def _chain(self, owner: str, response_id: str) -> list[_Kept] | None:
        """The response and all before it, the last one first; None where one of them is not known."""
        chain = []
        with self._lock:
            while response_id:
                kept = self._kept.get((owner, response_id))
                if kept is None:
                    return None
                self._kept.move_to_end((owner, response_id))
                chain.append(kept)
                response_id = kept.previous
        return chain

    def put(self, owner: str, response_id: str, items: Sequence[Json], previous: str = "") -> None:
        data = _encode(list(items))
        if len(data) > self.longest:
            return
        with self._lock:
            before = self._kept.pop((owner, response_id), None)
            self._bytes += len(data) - (len(before.items) if before is not None else 0)
            self._kept[owner, response_id] = _Kept(data, previous)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._kept.popitem(last=False)[1].items)


class _OwnResponses:
    def __init__(self, all: RecentResponses, owner: str) -> None:
        self._all = all
        self._owner = owner

    def items(self, response_id: str) -> list[Json] | None:
        return self._all.get(self._owner, response_id)

    def keep(self, response_id: str, items: Sequence[Json], previous: str = "") -> None:
        self._all.put(self._owner, response_id, items, previous)


def references(items: Sequence[Any]) -> list[str]:
    """Ids of the responses whose items are named among `items`, the latest first."""
    found: list[str] = []
    for item in reversed(items):
        if _is_reference(item):
            match = _ITEM.fullmatch(item["id"])
            if match is not None and PREFIX + match[1] not in found:
                found.append(PREFIX + match[1])
    return found


def resolved(items: Sequence[Any], history: ResponseHistory | None) -> list[Any]:
    """`items` with those in place of references that `history` has. The others are left: whoever reads them refuses."""
    if history is None:
        return list(items)
    known: dict[str, Json] = {}
    for response_id in references(items):
        # The latest one's conversation has most likely the items of the earlier ones too.
        if not any(id.endswith(response_id.removeprefix(PREFIX), 0, -2) for id in known):
            known = {item["id"]: item for item in history.items(response_id) or () if "id" in item} | known
    return [known.get(item["id"], item) if _is_reference(item) else item for item in items]


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE and isinstance(item.get("id"), str)
