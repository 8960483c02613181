"""What spells a reply's text again, token by token: cut out where it would be looked through or stored for nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.jsontext import replaced, value_spans

_SPELLED = frozenset({"token_ids", "prompt_token_ids", "logprobs"})
_LONG_REPLY = 4096  # bytes

_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class _SpelledChoice(msgspec.Struct, gc=False):
    token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()


class _SpelledReply(msgspec.Struct, gc=False):
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[_SpelledChoice] = []


_spelled = msgspec.json.Decoder(_SpelledReply)


def parsed(body: bytes) -> Any:
    """JSON; of a reply without what spells its text again, which goes anyway where something is found."""
    tree = _decode(slim(body) if len(body) > _LONG_REPLY else body)
    choices = tree.get("choices") if isinstance(tree, dict) else None
    if isinstance(choices, list):
        for part in (tree, *choices):
            if isinstance(part, dict):
                part.update((name, None) for name in _SPELLED & part.keys())
    return tree


def slim(body: bytes) -> bytes:
    """A reply without the long arrays in it, which take longer to parse than to cut out."""
    if not any(name in body for name in (b'"logprobs"', b"_ids")):
        return body
    try:
        reply = _spelled.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    choices = reply.choices
    for name, values in (
        (b'"logprobs"', [choice.logprobs for choice in choices]),  # first, as the longest
        (b'"token_ids"', [choice.token_ids for choice in choices]),
        (b'"prompt_token_ids"', [reply.prompt_token_ids]),
    ):
        spans = value_spans(body, name, values, b"null")
        if spans is not None:  # else what is left is only looked through
            body = replaced(body, spans)
    return body


def without_ids(body: bytes, streamed: bool) -> bytes:
    """A response without what spells its text again, token by token."""
    if not any(name.encode() in body for name in _SPELLED):
        return body
    lines = body.split(b"\n") if streamed else [body]
    for number, line in enumerate(lines):
        head, text = (line[:5], line[5:]) if streamed else (b"", line)
        try:
            if head in (b"", b"data:"):
                lines[number] = head + _encode(_without_spelling(_decode(text)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return b"\n".join(lines)


def _without_spelling(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            name: None if name in _SPELLED and isinstance(child, dict | list) else _without_spelling(child)
            for name, child in tree.items()
        }
    return [_without_spelling(child) for child in tree] if isinstance(tree, list) else tree
