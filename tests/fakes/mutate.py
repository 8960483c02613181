"""Breaks JSON, event streams and bytes as clients, engines and attackers do. All chance is the caller's."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

Json = dict[str, Any]

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -0.0, 0.5, 1e308, -(2**31), 2**31, 2**53 + 1, 2**63, 2**64, 10**400, "", " ", "x",
    "0", "null", "\x00", "\u2028", "\ud800", "\udfff\ud800", "é" * 3, "data: [DONE]\n\n", "\r\n\r\n", "a" * 5000,
    [], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"role": "user"}, [1, "x", None, {}], float("nan"),
    float("inf"), float("-inf"),
)  # fmt: skip
ODD_BYTES = (
    b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\n", b"\r", b"\r\n\r\n",
    b"\n\n", b"data: [DONE]\n\n", b"data:", b": ", b"event: x\n", b"\\u0000", b"\\ud800", b"\\", b'"',
    b"{", b"}", b"[", b"]",
    b",", b":", b"null", b"NaN", b"1e999", b"-", b"0" * 400, b"1" * 400, b'"error": {}', b'"choices": []', b"[" * 3000,
    b'{"a":' * 3000,
)  # fmt: skip


def odd_value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(ODD_VALUES))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Each container in it with each of its keys or positions."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        waiting += [one[key] for key in keys]
    return found


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """A copy with one to three changes of structure."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.randint(1, 3)):
        found = places(tree)
        if not found or chance.random() < 0.02:
            return odd_value(chance)
        container, key = chance.choice(found)
        match chance.randrange(7):
            case 0:
                del container[key]
            case 1:
                container[key] = [container[key]]
            case 2:
                container[key] = {"x": container[key]}
            case 3:
                other, other_key = chance.choice(found)
                container[key] = copy.deepcopy(other[other_key])
            case 4 if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case 5 if isinstance(container, dict):
                container[
                    chance.choice(("x", "", "error", "stream", "n", "index", "type", "logprobs", "token_ids"))
                ] = odd_value(chance)
            case _:
                container[key] = odd_value(chance)
    return tree


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to three changes of bytes, anywhere."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randint(0, len(data))
        end = min(len(data), at + chance.choice((1, 2, 8, 100)))
        match chance.randrange(6):
            case 0:
                data = data[:at]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + chance.choice(ODD_BYTES) + data[at:]
            case 3:
                data = data[:at] + data[at:end] * 2 + data[end:]
            case 4:
                data = data[:at] + bytes(chance.randrange(256) for _ in range(end - at)) + data[end:]
            case _:
                data = data[:at] + chance.choice(ODD_BYTES) + data[end:]
    return data


def dump(tree: Any, chance: random.Random) -> bytes:
    """JSON as lax writers make it: NaN, lone surrogates and doubled keys may be in it."""
    text = json.dumps(tree, ensure_ascii=chance.random() < 0.5, separators=chance.choice(((",", ":"), (", ", ": "))))
    if isinstance(tree, dict) and tree and chance.random() < 0.1:
        name = chance.choice(list(tree))
        text = text[:-1] + "," + json.dumps(name) + ":" + json.dumps(odd_value(chance)) + "}"
    return text.encode("utf-8", chance.choice(("surrogatepass", "replace", "backslashreplace")))


def broken_json(tree: Any, chance: random.Random) -> bytes:
    """`tree` with something wrong in its structure, its bytes or both; sometimes nothing is."""
    kind = chance.random()
    data = dump(mutate_tree(tree, chance) if kind < 0.7 else tree, chance)
    return mutate_bytes(data, chance) if kind > 0.6 else data


def broken_stream(chunks: list[Any], chance: random.Random) -> list[bytes]:
    """Events of a stream of `chunks` with some changed, lost, doubled or swapped, and cut at odd places."""
    chunks = list(chunks)
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(chunks)) if chunks else 0
        match chance.randrange(5) if chunks else 5:
            case 0:
                chunks[at] = mutate_tree(chunks[at], chance)
            case 1:
                del chunks[at]
            case 2:
                chunks.insert(at, copy.deepcopy(chunks[at]))
            case 3:
                other = chance.randrange(len(chunks))
                chunks[at], chunks[other] = chunks[other], chunks[at]
            case _:
                chunks.insert(at, odd_value(chance))
    end = chance.choice(("\n\n", "\r\n\r\n", "\n\n"))
    events = [b"data: " + dump(chunk, chance) + end.encode() for chunk in chunks]
    if chance.random() < 0.8:
        events.append(b"data: [DONE]\n\n")
    data = b"".join(events)
    if chance.random() < 0.4:
        data = mutate_bytes(data, chance)
    cuts = sorted(chance.randint(0, len(data)) for _ in range(chance.randint(0, 4)))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if stop > start]
