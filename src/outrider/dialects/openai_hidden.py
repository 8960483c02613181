"""What an agent gets of an OpenAI reply or chunk: without what only the gateway asked for, else to the byte.

A reply of 2,000 tokens is 60 KB, nearly all of it ids and log-probs. To parse and write that again for the agent costs
more than anything else that is done with it, so members are cut out of the text where they stand. That is done only
where it is certain: where a name stands exactly as often as the reply is known to have that member in a place that
counts. Anything else (a nested field of the same name, a name spelled with escapes) is taken apart and written anew.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import Any

import msgspec

from outrider.jsontext import Spans, replaced, value_spans
from outrider.wire import Event

Fields = dict[str, msgspec.Raw]
NULL = msgspec.Raw(b"null")
_IDS = b'token_ids"'  # the end of both names
_ID_MEMBER = re.compile(rb'"(?:prompt_)?token_ids"[ \t\r\n]*:[ \t\r\n]*\[')
# Where Outrider's engine puts them: right behind `token_ids`. Their last bracket is the last before the next name.
_VERSIONS_MEMBER = re.compile(rb'[ \t\r\n]*,[ \t\r\n]*"policy_versions"[ \t\r\n]*:[ \t\r\n]*\[[][0-9, \t\r\n-]*\]')
_PROMPT = b'"prompt_'
_COMMA = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*")
_SPACE = b" \t\r\n"
_LINE_END = re.compile(rb"\r\n|\n|\r")  # of an event
_LOOK_BACK = 64  # bytes in which a comma before a member is looked for


class Known(msgspec.Struct, gc=False):
    """What the reader of a reply found in it."""

    id_lists: int
    """Lists of token ids, of the prompt's too."""
    versions: int
    """Choices with `policy_versions`."""
    model: msgspec.Raw
    """The value of the field `model`; empty where there is none."""
    only_usage: bool
    """It has usage and no choices, as the last chunk of a stream does."""


class _ChoiceLogprobs(msgspec.Struct, gc=False):
    logprobs: msgspec.Raw = msgspec.Raw()


class _ReplyLogprobs(msgspec.Struct, gc=False):
    choices: list[_ChoiceLogprobs] = []


_fields = msgspec.json.Decoder(Fields)
_choice_fields = msgspec.json.Decoder(list[Fields])
_reply_logprobs = msgspec.json.Decoder(_ReplyLogprobs)
_encode = msgspec.json.Encoder().encode


def shown(data: bytes, known: Known | None, *, ids: bool, logprobs: bool, model: msgspec.Raw | None) -> bytes:
    """`data` without token ids and their policy versions (`ids`), with ``null`` for log-probs (`logprobs`), and under
    the name `model`.

    `known` is None where `data` could not be read as a reply. The same object where nothing changes, and for a shape
    that nobody knows.
    """
    if model is None and not ids and not logprobs:
        return data
    try:
        spans = None if known is None else _spans(data, known, ids, logprobs, model)
        return _taken_apart(data, ids, logprobs, model) if spans is None else replaced(data, spans)
    except (msgspec.DecodeError, RecursionError):
        return data


def event_with(event: Event, data: bytes) -> bytes:
    """`event` with other data, which may have several lines; the rest of it (``event``, ``id``, ``retry``) stays."""
    lines = b"".join(b"data: %b\n" % line for line in _LINE_END.split(data))
    raw = event.raw
    if raw.startswith(b"data:") and raw.count(b"\n") == 2:
        return lines + b"\n"
    others = [line for line in _LINE_END.split(raw.removeprefix(BOM_UTF8)) if not line.startswith(b"data")]
    return b"".join(b"%b\n" % line for line in others if line) + lines + b"\n"


def _spans(data: bytes, known: Known, ids: bool, logprobs: bool, model: msgspec.Raw | None) -> Spans | None:
    """What to change; None where that isn't certain."""
    spans = _id_spans(data, known.id_lists, known.versions) if ids else []
    if logprobs and spans is not None:
        values = [choice.logprobs for choice in _reply_logprobs.decode(data).choices]
        spans = _joined(spans, value_spans(data, b'"logprobs"', values, b"null"))
    if model is not None and spans is not None:
        spans = _joined(spans, value_spans(data, b'"model"', [known.model], bytes(model)))
    return spans


def _joined(spans: Spans, more: Spans | None) -> Spans | None:
    return None if more is None else spans + more


def _id_spans(data: bytes, id_lists: int, versions: int) -> Spans | None:
    """The lists of ids, each with its name and a comma, the one before it where there is one; those of choices with
    their versions."""
    spans: Spans = []
    last = versions_found = 0
    at = data.find(_IDS)
    while at >= 0:
        start = at - len(_PROMPT) if data.startswith(_PROMPT, at - len(_PROMPT)) else at - 1
        member = _ID_MEMBER.match(data, start)
        if member is None or data[start - 1 : start] == b"\\":
            return None
        end = data.find(b"]", member.end()) + 1  # it was read as a list of numbers: no bracket is within it
        if versions and start == at - 1 and (behind := _VERSIONS_MEMBER.match(data, end)):
            end = behind.end()
            versions_found += 1
        look = max(last, start - _LOOK_BACK)
        before = data[look:start].rstrip(_SPACE)
        if before.endswith(b","):
            start = look + len(before) - 1
        elif not before and look > last:
            return None
        elif comma := _COMMA.match(data, end):
            end = comma.end()
        spans.append((start, end, b""))
        last = end
        at = data.find(_IDS, end)
    return spans if len(spans) == id_lists and versions_found == versions else None


def _taken_apart(data: bytes, ids: bool, logprobs: bool, model: msgspec.Raw | None) -> bytes:
    """The same for any reply, with no more white space between members."""
    fields: dict[str, Any] = dict(_fields.decode(data))
    changed = ids and fields.pop("prompt_token_ids", None) is not None
    if model is not None and fields.get("model", model) != model:
        fields["model"] = model
        changed = True
    if "choices" in fields:
        choices = _choice_fields.decode(fields["choices"])
        for choice in choices:
            changed |= _hide_in_choice(choice, ids, logprobs)
        fields["choices"] = choices
    return _encode(fields) if changed else data


def _hide_in_choice(choice: Fields, ids: bool, logprobs: bool) -> bool:
    changed = False
    if ids:
        changed = choice.pop("token_ids", None) is not None
        changed |= choice.pop("prompt_token_ids", None) is not None
        changed |= choice.pop("policy_versions", None) is not None
    if logprobs and choice.get("logprobs", NULL) != NULL:
        choice["logprobs"] = NULL
        changed = True
    return changed
