"""Takes secrets and e-mail addresses out of a call before it is stored. What is forwarded stays as it was.

Which words are secrets, `patterns` knows. Texts are looked through as they mean, not as JSON writes them, and a
stream's pieces as the text that they make. A plain body is only scanned at first (`scan`), and mostly that is all.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from outrider.gateway.redaction.json_strings import strings_in, strings_of
from outrider.gateway.redaction.leaves import SHORTEST_SECRET, Leaf, leaves_of, put_back
from outrider.gateway.redaction.patterns import patterns
from outrider.gateway.redaction.scan import Scan
from outrider.gateway.redaction.seen import Seen
from outrider.gateway.redaction.spelled import parsed, slim, without_ids
from outrider.types import Call, Choice, Fidelity

_BETWEEN = "\n\0\n"  # stands between two texts, so that nothing is found across them
_NO_IDS = np.zeros(0, dtype=np.int32)
_NO_LOGPROBS = np.zeros(0, dtype=np.float32)
_MIN_CREDENTIAL = 8

_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode


class _Span(NamedTuple):
    start: int
    end: int
    kind: str


class Redactor:
    """`patterns` are the user's own. The libraries are loaded with the first call, which a trainer may never make."""

    def __init__(self, patterns: Sequence[str] = (), *, fast: bool = True) -> None:
        """Without `fast` nothing is scanned before it is taken apart; the outcome is the same."""
        self._own = patterns
        self._fast = fast
        self._seen = Seen()

    @functools.cached_property
    def _scan(self) -> Scan:
        return Scan(patterns(self._own), fast=self._fast)

    def call(self, call: Call, credentials: Sequence[str] = ()) -> tuple[Call, Counter[str]]:
        """The call as it may be stored, and how often each kind was found. `credentials` are taken out as they are.

        Token ids are text in another spelling: where anything was found, they go too, and the call is text.
        """
        hits: Counter[str] = Counter()
        credentials = [credential for credential in credentials if len(credential) >= _MIN_CREDENTIAL]
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
        response = without_ids(response, streamed)
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
        if not text:
            return text
        leaf = Leaf(None, None, text, None)
        self._clean([leaf], credentials, hits)
        return leaf.text

    def _body(self, body: bytes, credentials: Sequence[str], hits: Counter[str]) -> bytes:
        """The same object where there is nothing to take out."""
        if self._scan.clean(body, credentials):
            return body
        short = slim(body)
        try:
            tree = _decode(short)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            text = body.decode("latin-1")  # keeps each byte
            shown = self.text(text, credentials, hits)
            return body if shown == text else shown.encode("latin-1")
        root = [tree]
        leaves = list(leaves_of(root, ()))
        if not self._clean(leaves, credentials, hits):
            if strings_in(short) == strings_of(tree):
                return body
            hits["repeated_name"] += 1  # of two values under one name only the last was looked at, and is kept
        put_back(leaves)
        return _encode(root[0])

    def _stream(self, body: bytes, credentials: Sequence[str], hits: Counter[str]) -> bytes:
        lines = body.split(b"\n")
        trees: dict[int, Any] = {}
        leaves: list[Leaf] = []
        for number, line in enumerate(lines):
            if not line.startswith(b"data:"):
                continue
            try:
                trees[number] = [parsed(line[5:])]
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                trees[number] = [line[5:].decode("latin-1")]
            leaves += leaves_of(trees[number], ())
        if not self._clean(leaves, credentials, hits):
            return body
        put_back(leaves)
        for number, (tree,) in trees.items():
            text = tree.encode("latin-1", "replace") if isinstance(tree, str) else _encode(tree)
            lines[number] = b"data: " + text.lstrip()
        return b"\n".join(lines)

    def _clean(self, leaves: list[Leaf], credentials: Sequence[str], hits: Counter[str]) -> bool:
        """Take what is found out of the leaves' texts; returns whether there was anything."""
        runs: dict[Any, list[Leaf]] = {}
        for number, leaf in enumerate(leaves):
            runs.setdefault(number if leaf.run is None else leaf.run, []).append(leaf)
        looked: list[str] = []  # the texts of runs that have to be looked through
        ordered: list[Leaf] = []
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
        cuts: dict[int, list[tuple[int, int, str]]] = {}  # of each leaf: from, to, and what stands there instead
        for span in spans:
            hits[span.kind] += 1
            first = bisect.bisect_right(starts, span.start) - 1
            found.add(owners[first])
            for number in range(first, len(ordered)):
                start = starts[number]
                if start >= span.end and number > first:
                    break
                mark = f"[redacted:{span.kind}]" if number == first else ""
                cuts.setdefault(number, []).append((max(0, span.start - start), max(0, span.end - start), mark))
        for number, places in cuts.items():
            ordered[number].text = _cut(ordered[number].text, places)
        self._seen.add(text for number, text in enumerate(looked) if number not in found)
        return bool(spans)

    def _spans(self, text: str, credentials: Sequence[str]) -> list[_Span]:
        """What to take out, in order and without overlap."""
        found = [
            _Span(start, end, pattern.kind)
            for pattern in self._scan.patterns(text)
            for start, end in pattern.find(text)
        ]
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


def _cut(text: str, places: Sequence[tuple[int, int, str]]) -> str:
    """`text` with something else in `places`, which are in order: in one go, since a long text may have thousands."""
    parts: list[str] = []
    at = 0
    for start, end, new in places:
        parts += (text[at:start], new)
        at = end
    parts.append(text[at:])
    return "".join(parts)
