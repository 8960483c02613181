"""Takes secrets and e-mail addresses out of a call before it is stored. What is forwarded stays as it was.

Which words are secrets, `redact_patterns` knows. Texts are looked through as they mean, not as JSON writes them, and a
stream's pieces as the text that they make.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from outrider.gateway.redaction.json_strings import strings_in, strings_of
from outrider.gateway.redaction.patterns import Patterns, email_addresses, patterns
from outrider.jsontext import replaced, value_spans
from outrider.types import Call, Choice, Fidelity

_BETWEEN = "\n\0\n"  # stands between two texts, so that nothing is found across them
# Strings that come in pieces, and what tells one run of pieces from another.
_PIECES = frozenset(
    {"content", "text", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "partial_json", "delta"}
)
_INDEXES = ("index", "output_index", "content_index", "summary_index", "item_id", "type")
_INDEX = (int, str)
_CONTAINER = (dict, list)
# Token by token they spell the text again.
_SPELLED = frozenset({"token_ids", "prompt_token_ids", "logprobs"})
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)
_MIN_CREDENTIAL = 8
SHORTEST_SECRET = 12  # names below it are none, and most names are
LONG_REPLY = 4096  # bytes
SEEN = 16_384
SHORT = 64  # characters; to look through fewer costs no more than to remember them

_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class _SpelledChoice(msgspec.Struct, gc=False):
    token_ids: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()


class _SpelledReply(msgspec.Struct, gc=False):
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[_SpelledChoice] = []


_spelled = msgspec.json.Decoder(_SpelledReply)


@dataclass(slots=True)
class _Leaf:
    """A string and where it stands."""

    container: Any
    key: Any
    text: str
    run: tuple[Any, ...] | None
    """Leaves of one run are pieces of one text."""
    is_name: bool = False
    """It is the key itself, of an object."""


class _Span(NamedTuple):
    start: int
    end: int
    kind: str


class _Seen:
    """Texts in which nothing was found: an agent sends its whole conversation again with every call.

    They are known by a hash, the last `SEEN` of them at least. Safe to share between threads.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def clean(self, text: str) -> bool:
        if len(text) < SHORT:
            return False
        digest = _digest(text)
        return digest in self._young or digest in self._old

    def add(self, texts: Iterable[str]) -> None:
        self._young.update(_digest(text) for text in texts if len(text) >= SHORT)
        if len(self._young) >= SEEN:
            self._old, self._young = self._young, set()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Redactor:
    """`patterns` are the user's own. The library is loaded with the first call, which a trainer may never make."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._own = patterns
        self._seen = _Seen()

    @functools.cached_property
    def _patterns(self) -> list[Patterns]:
        return patterns(self._own)

    def call(self, call: Call, credentials: Sequence[str] = ()) -> tuple[Call, Counter[str]]:
        """The call as it may be stored, and how often each kind was found. `credentials` are taken out as they are.

        Token ids are text in another spelling: where anything was found, they go too, and the call is text.
        """
        hits: Counter[str] = Counter()
        request = self._body(call.request, credentials, hits)
        streamed = call.response.startswith((b"data:", b"event:", b":", b"id:", b"retry:"))
        response = (self._stream if streamed else self._body)(call.response, credentials, hits)
        error = self.text(call.error, credentials, hits)
        model = self.text(call.model, credentials, hits) if len(call.model) >= SHORTEST_SECRET else call.model
        sampling = call.sampling
        if any(isinstance(value, str | list | dict) for value in sampling.values()):
            sampling = _decode(self._body(_encode(sampling), credentials, hits))
        if not hits:
            return call, hits
        response = _without_ids(response, streamed)
        choices = tuple(
            Choice(index=choice.index, token_ids=_NO_IDS, logprobs=_NO_LOGPROBS, finish_reason=choice.finish_reason)
            for choice in call.choices
        )
        redacted = replace(
            call,
            request=request,
            response=response,
            error=error,
            model=model,
            sampling=sampling,
            prompt_ids=None,
            choices=choices,
            fidelity=Fidelity.TEXT,
            fidelity_reason=f"redacted: {hits.total()} parts were taken out, and the ids with them",
        )
        return redacted, hits

    def text(self, text: str, credentials: Sequence[str], hits: Counter[str]) -> str:
        leaf = _Leaf(None, None, text, None)
        self._clean([leaf], credentials, hits)
        return leaf.text

    def _body(self, body: bytes, credentials: Sequence[str], hits: Counter[str]) -> bytes:
        """The same object where there is nothing to take out."""
        slim = _slim(body)
        try:
            tree = _decode(slim)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            text = body.decode("latin-1")  # keeps each byte
            shown = self.text(text, credentials, hits)
            return body if shown == text else shown.encode("latin-1")
        root = [tree]
        leaves = list(_leaves(root, ()))
        if not self._clean(leaves, credentials, hits):
            if strings_in(slim) == strings_of(tree):
                return body
            hits["repeated_name"] += 1  # of two values under one name only the last was looked at, and is kept
        _put_back(leaves)
        return _encode(root[0])

    def _stream(self, body: bytes, credentials: Sequence[str], hits: Counter[str]) -> bytes:
        lines = body.split(b"\n")
        trees: dict[int, Any] = {}
        leaves: list[_Leaf] = []
        for number, line in enumerate(lines):
            if not line.startswith(b"data:"):
                continue
            try:
                trees[number] = [_parsed(line[5:])]
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                trees[number] = [line[5:].decode("latin-1")]
            leaves += _leaves(trees[number], ())
        if not self._clean(leaves, credentials, hits):
            return body
        _put_back(leaves)
        for number, (tree,) in trees.items():
            text = tree.encode("latin-1", "replace") if isinstance(tree, str) else _encode(tree)
            lines[number] = b"data: " + text.lstrip()
        return b"\n".join(lines)

    def _clean(self, leaves: list[_Leaf], credentials: Sequence[str], hits: Counter[str]) -> bool:
        """Take what is found out of the leaves' texts; returns whether there was anything."""
        credentials = [credential for credential in credentials if len(credential) >= _MIN_CREDENTIAL]
        runs: dict[Any, list[_Leaf]] = {}
        for number, leaf in enumerate(leaves):
            runs.setdefault(number if leaf.run is None else leaf.run, []).append(leaf)
        looked: list[str] = []  # the texts of runs that have to be looked through
        ordered: list[_Leaf] = []
        starts: list[int] = []
        owners: list[int] = []  # of each leaf its text
        position = 0
        for run in runs.values():
            text = run[0].text if len(run) == 1 else "".join(leaf.text for leaf in run)
            if self._seen.clean(text) and not any(credential in text for credential in credentials):
                continue
            for leaf in run:
                ordered.append(leaf)
                starts.append(position)
                owners.append(len(looked))
                position += len(leaf.text)
            looked.append(text)
            position += len(_BETWEEN)
        spans = self._spans(_BETWEEN.join(looked), credentials)
        found = set()
        for span in reversed(spans):  # from the end, so that positions before it still hold
            hits[span.kind] += 1
            first = bisect.bisect_right(starts, span.start) - 1
            found.add(owners[first])
            for number in range(first, len(ordered)):
                start = starts[number]
                if start >= span.end and number > first:
                    break
                text = ordered[number].text
                mark = f"[redacted:{span.kind}]" if number == first else ""
                head, tail = max(0, span.start - start), max(0, span.end - start)
                ordered[number].text = text[:head] + mark + text[tail:]
        self._seen.add(text for number, text in enumerate(looked) if number not in found)
        return bool(spans)

    def _spans(self, text: str, credentials: Sequence[str]) -> list[_Span]:
        """What to take out, in order and without overlap."""
        found = [
            _Span(*match.span("secret" if "secret" in regex.groupindex else 0), kind)
            for words, kinds in self._patterns
            if not words or any(word in text for word in words)
            for kind, regex in kinds
            for match in regex.finditer(text)
        ]
        found += [_Span(start, end, "email") for start, end in email_addresses(text)]
        for credential in credentials:
            found += [
                _Span(match.start(), match.end(), "credential") for match in re.finditer(re.escape(credential), text)
            ]
        spans: list[_Span] = []
        found = [span for span in found if span.end > span.start]
        for span in sorted(found, key=lambda span: (span.start, -span.end)):
            if spans and span.start < spans[-1].end:
                if span.end > spans[-1].end:
                    spans[-1] = spans[-1]._replace(end=span.end)
            else:
                spans.append(span)
        return spans


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[_Leaf]:
    """Every string in a tree, with what run of pieces it belongs to."""
    if isinstance(value, dict):
        indexes = [value[name] for name in _INDEXES if name in value]
        if indexes:
            path = (*path, *(index for index in indexes if isinstance(index, _INDEX)))
        for name, child in value.items():
            if len(name) >= SHORTEST_SECRET:
                yield _Leaf(value, name, name, None, is_name=True)
            if isinstance(child, str):
                yield _Leaf(value, name, child, (*path, name) if name in _PIECES else None)
            elif isinstance(child, _CONTAINER):
                yield from _leaves(child, (*path, name))
    else:
        for number, child in enumerate(value):
            if isinstance(child, str):
                yield _Leaf(value, number, child, None)
            elif isinstance(child, _CONTAINER):
                yield from _leaves(child, path if isinstance(child, dict) and "index" in child else (*path, number))


def _put_back(leaves: list[_Leaf]) -> None:
    for leaf in leaves:
        if not leaf.is_name:
            leaf.container[leaf.key] = leaf.text
    for leaf in leaves:
        if leaf.is_name and leaf.text != leaf.key:
            leaf.container[leaf.text] = leaf.container.pop(leaf.key)


def _parsed(body: bytes) -> Any:
    """JSON; of a reply without what spells its text again, which goes anyway where something is found."""
    tree = _decode(_slim(body) if len(body) > LONG_REPLY else body)
    choices = tree.get("choices") if isinstance(tree, dict) else None
    if isinstance(choices, list):
        for part in (tree, *choices):
            if isinstance(part, dict):
                part.update((name, None) for name in _SPELLED & part.keys())
    return tree


def _slim(body: bytes) -> bytes:
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


def _without_ids(body: bytes, streamed: bool) -> bytes:
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
