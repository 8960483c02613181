"""Which trajectory a call without a key belongs to, and whether it is one of those that are kept.

An agent may name its trajectory by a header. Otherwise a call whose messages begin with all those of an earlier call
goes on with that one's trajectory. What a message means is compared, not how it is written: a string or blocks of
text, arguments as JSON in any order, cache marks or none.

Names are made of what the calls hold, so that two gateways give one conversation the same name, and therefore keep it
both or not at all.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from outrider.jsontext import LongTextsApart, text_pieces
from outrider.types import Json

REMEMBERED = 65_536  # calls whose messages are known, and trajectories
LONG = 1 << 10  # characters
LARGE = 1 << 20  # bytes of a field
_PIECE = 1 << 20  # of a text: characters, or bytes of its spelling
_encode = msgspec.json.Encoder(order="deterministic").encode
# What the model said, in the words of each dialect. Thinking is none of it: clients keep or drop it as they like.
_SAID = frozenset({"function_call", "custom_tool_call"})
_IGNORED = frozenset({"reasoning", "thinking", "redacted_thinking"})
# Names of texts, which are made short where they are long, and of what holds them.
_TEXTS = frozenset({"content", "data", "file_data", "image_url", "output", "text", "url"})
_CONTAINERS = frozenset({"content", "file", "image_url", "output", "source"})


def is_kept(trajectory: str, rate: float) -> bool:
    """True for a share of `rate` of all trajectories, and the same ones in every gateway."""
    if rate >= 1:
        return True
    drawn = int.from_bytes(hashlib.sha256(trajectory.encode()).digest()[:7]) / 2**56
    return drawn < rate


class Chains:
    """Remembers in memory which messages were asked about, most recently used first to stay."""

    def __init__(self) -> None:
        self._asked: OrderedDict[bytes, str] = OrderedDict()
        self._names: OrderedDict[str, None] = OrderedDict()
        self.answers: OrderedDict[str, str] = OrderedDict()
        """Trajectories of calls by the calls' ids, for requests that name an earlier answer."""

    def answered(self, call_id: str, trajectory: str) -> None:
        _remember(self.answers, call_id, trajectory)

    def trajectory(self, owner: str, fields: Mapping[str, msgspec.Raw]) -> str:
        """The name of the trajectory of a request by `owner` with these top-level fields."""
        digest = hashlib.sha256(owner.encode())
        prefixes: list[bytes] = []
        opening = b""
        for is_answer, meaning in _turns(fields):
            if is_answer and not opening:
                opening = digest.digest()
            digest.update(meaning)
            prefixes.append(digest.digest())
        whole = prefixes.pop() if prefixes else digest.digest()
        name = next((self._asked[prefix] for prefix in reversed(prefixes) if prefix in self._asked), "")
        if not name:
            name = f"chain-{(opening or whole).hex()[:24]}"
            if name in self._names:  # begun before, by somebody who only began with the same words
                name = f"{name}-{_suffix()}"
            _remember(self._names, name, None)
        _remember(self._asked, whole, name)
        return name


def _suffix() -> str:
    """Of no other name. It grows with time: in a store's index it costs less to add at the end than anywhere."""
    return f"{time.time_ns() >> 20:011x}{secrets.token_hex(4)}"


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


def _turns(fields: Mapping[str, msgspec.Raw]) -> list[tuple[bool, bytes]]:
    """Each turn of the conversation: whether the model said it, and what it means."""
    turns: list[tuple[bool, bytes]] = []
    previous = fields.get("previous_response_id")
    if previous is not None:
        turns.append((False, bytes(previous)))
    # Anthropic's system prompt is left out: its head may change with each request.
    for name in ("instructions", "messages", "input", "prompt"):
        if name not in fields:
            continue
        try:
            turns += _turns_of(name, _decoded(fields[name]))
        except (msgspec.MsgspecError, RecursionError):  # numbers out of range, or nested too deeply to look into
            turns.append((False, bytes(fields[name])))
    return turns


def _decoded(raw: msgspec.Raw) -> Any:
    """Of a large field without a copy of what `_short` makes a hash of."""
    return msgspec.json.decode(raw) if len(memoryview(raw)) < LARGE else _APART.decode(raw)


def _turns_of(name: str, value: Any) -> list[tuple[bool, bytes]]:
    turns = []
    for item in value if isinstance(value, list) else [value]:
        if name == "input" and isinstance(item, str):
            item = {"role": "user", "content": item}
        if not isinstance(item, dict):
            turns.append((False, _encode(_short(item) if isinstance(item, str) else item)))
            continue
        role, content = item.get("role"), item.get("content")
        if len(item) == 2 and role and content and isinstance(content, str):  # most are as plain as that
            turns.append((role == "assistant", _encode((role, (_short(content),)))))
        elif _type(item) not in _IGNORED:
            said = role == "assistant" or _type(item) in _SAID
            turns.append((said, _encode((role or item.get("type"), _meaning(item)))))
    return turns


def _type(item: Json) -> str:
    kind = item.get("type")
    return kind if isinstance(kind, str) else ""


def _meaning(item: Json) -> list[Any]:
    """What of a message or item would change the prompt, in one form for all dialects."""
    parts: list[Any] = []
    for name in ("content", "output", "input"):
        if item.get(name) is not None:
            parts += _parts(item[name])
    calls = item.get("tool_calls")
    for call in [*(calls if isinstance(calls, list) else ()), *([item] if _type(item) in _SAID else ())]:
        if isinstance(call, dict):
            function = call.get("function")
            function = function if isinstance(function, dict) else call
            parts.append([function.get("name"), _parsed(function.get("arguments"))])
    return parts


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [_short(content)] if content else []
    if not isinstance(content, list):
        return [_shortened(content)]
    found: list[Any] = []
    for block in content:
        if not isinstance(block, dict):
            found.append(block)
        elif _type(block) in _IGNORED:
            continue
        elif isinstance(block.get("text"), str):
            found.append(_short(block["text"]))
        elif block.get("type") == "tool_use":
            found.append([block.get("name"), block.get("input")])
        elif block.get("type") == "tool_result":
            found += _parts(block.get("content"))
        else:
            found.append(_shortened({name: value for name, value in block.items() if name != "cache_control"}))
    return found


def _shortened(value: Any) -> Any:
    """As `_APART` does it in a large request."""
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _short(child)
        if isinstance(child, str) and name in _TEXTS
        else _shortened(child)
        if name in _CONTAINERS
        else child
        for name, child in value.items()
    }


def _short(text: str) -> str:
    """In place of a long text its hash, taken piece by piece: to write it down would be one more copy of it."""
    if len(text) < LONG:
        return text
    return _hash(text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _short_spelled(spelled: memoryview) -> str:
    """The same for a text in JSON's spelling."""
    if len(spelled) < _PIECE:
        return _short("".join(text_pieces(spelled, _PIECE)))
    return _hash(text_pieces(spelled, _PIECE))


def _hash(pieces: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return f"sha256:{digest.hexdigest()}"


_APART = LongTextsApart(_short_spelled, texts=_TEXTS, containers=_CONTAINERS)


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
