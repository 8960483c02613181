"""What the two OpenAI text protocols share: parsing, sampling overrides, errors, and reading a reply.

Fields beyond OpenAI's own are vLLM's: `return_token_ids` in the request; `prompt_token_ids` on the reply or a choice
and `token_ids` on each choice or streamed chunk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from outrider.errors import RequestError
from outrider.types import Json, Usage
from outrider.wire import ErrorReply, Event, ReplyTokens, SampledChoice, UpstreamRequest, WireRequest

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]

# Names of `UpstreamRequest.hidden`.
TOKEN_IDS = "token_ids"
LOGPROBS = "logprobs"
USAGE = "usage"

SAMPLING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n", "best_of", "max_tokens",
    "max_completion_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "ignore_eos", "use_beam_search",
})  # fmt: skip
# Two names of one parameter: overriding either removes what the agent sent under the other.
ALIASES = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
DONE = b"[DONE]"
NULL = msgspec.Raw(b"null")
TRUE = msgspec.Raw(b"true")

_fields = msgspec.json.Decoder(Fields)
_choice_fields = msgspec.json.Decoder(list[Fields])
_encode = msgspec.json.Encoder().encode


class RequestHead(msgspec.Struct, gc=False):
    """The fields of a request that matter here, with the types that both protocols give them."""

    model: str = ""
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None


# -- requests ----------------------------------------------------------------------------------------------------------


def parse_request(body: bytes, head: msgspec.json.Decoder[Any]) -> WireRequest:
    """Check `body` against the struct that `head` decodes and keep every field's own text. Raises `RequestError`."""
    try:
        body.decode()  # skipped strings are not checked by the JSON parser
        checked = head.decode(body)
        fields = _fields.decode(body)
    except UnicodeDecodeError as error:
        raise RequestError(f"The request body is not valid UTF-8 (byte {error.start}).") from None
    except msgspec.ValidationError as error:
        raise RequestError(f"The request is not valid: {error}.") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The request body could not be parsed as JSON: {error}.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    sampling = {name: msgspec.json.decode(fields[name]) for name in SAMPLING & fields.keys()}
    return WireRequest(body=body, fields=fields, model=checked.model, stream=bool(checked.stream), sampling=sampling)


def prepare_request(
    request: WireRequest,
    *,
    overrides: Json,
    tokens: bool,
    model: str,
    logprobs: Callable[[Mapping[str, msgspec.Raw]], Any],
) -> UpstreamRequest:
    """`logprobs` gives the value of that field to set, or None where the agent asked for log-probs itself."""
    renamed = bool(model) and model != request.model
    if not tokens and not overrides and not renamed:
        return UpstreamRequest(body=request.body, sampling=request.sampling)
    fields: dict[str, Any] = dict(request.fields)
    sampling = dict(request.sampling)
    if renamed:
        fields["model"] = model
    for name, value in overrides.items():
        alias = ALIASES.get(name)
        if alias is not None and alias not in overrides:
            fields.pop(alias, None)
            sampling.pop(alias, None)
        fields[name] = sampling[name] = value
    hidden = set()
    if tokens:
        if not _is_true(request.fields.get("return_token_ids")):
            fields["return_token_ids"] = TRUE
            hidden.add(TOKEN_IDS)
        wanted = logprobs(request.fields)
        if wanted is not None:
            fields["logprobs"] = wanted
            hidden.add(LOGPROBS)
        if request.stream:
            options = _decode_or_none(request.fields.get("stream_options")) or {}
            if options.get("include_usage") is not True:
                fields["stream_options"] = options | {"include_usage": True}
                hidden.add(USAGE)
    return UpstreamRequest(
        body=_encode(fields),
        sampling=sampling,
        hidden=frozenset(hidden),
        model=request.model if renamed else "",
    )


def _is_true(raw: msgspec.Raw | None) -> bool:
    return _decode_or_none(raw) is True


def _decode_or_none(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


# -- errors ------------------------------------------------------------------------------------------------------------


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(status: int, message: str, *, code: str | None = None) -> bytes:
    # The SDKs raise on a data line whose object has `error`; the number lets others see the status that was too late.
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": None, "code": code or status}
    return b"data: " + _encode({"error": error}) + b"\n\n"


# -- replies -----------------------------------------------------------------------------------------------------------

Ids = list[int | None]


class _UsageFields(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    """A choice of a reply or chunk; subclasses add `logprobs` in their protocol's shape."""

    index: int = 0
    token_ids: Ids | None = None
    prompt_token_ids: Ids | None = None
    finish_reason: str | None = None


class ReplyFields(msgspec.Struct, gc=False):
    """A reply or chunk; subclasses add `choices`."""

    prompt_token_ids: Ids | None = None
    usage: _UsageFields | None = None
    error: Any = None
    object: Any = None
    message: Any = None


class _Tally:
    """One choice as it comes in."""

    __slots__ = ("entry_ids", "finish_reason", "logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: Ids = []
        self.entry_ids: Ids = []
        self.logprobs: list[float | None] = []
        self.finish_reason: str | None = None


class OpenAIReader:
    """Reads replies of both protocols.

    `reply` decodes a reply or chunk into a `ReplyFields`; `entries` gives the log-probs of a choice and, where its
    entries carry them, their token ids.
    """

    def __init__(
        self,
        request: UpstreamRequest,
        reply: msgspec.json.Decoder[Any],
        entries: Callable[[Any], tuple[list[float | None], Ids]],
    ) -> None:
        self._hidden = request.hidden
        self._model = msgspec.Raw(_encode(request.model)) if request.model else None
        self._reply = reply
        self._entries = entries
        self._choices: dict[int, _Tally] = {}
        self._prompt_ids: Ids | None = None
        self._usage: Usage | None = None
        self._problem = ""
        self.terminal = False
        self.error = ""

    @property
    def finished(self) -> bool:
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())

    def body(self, body: bytes) -> bytes:
        self._take(body)
        return self._shown(body) if self._choices else body

    def event(self, event: Event) -> bytes:
        data = event.data
        if data == DONE:
            self.terminal = True
            return event.raw
        if not data:
            return event.raw
        had_choices, had_usage = self._take(data)
        if had_usage and not had_choices and USAGE in self._hidden:
            return b""
        shown = self._shown(data)
        if shown is data:
            return event.raw
        name = b"event: " + event.name + b"\n" if event.name else b""
        return name + b"data: " + shown + b"\n\n"

    def end(self) -> bytes:
        return b""

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return error_event(status, message, code=code)

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        return ErrorReply(status, body)

    def result(self) -> ReplyTokens:
        choices = []
        problem = self._problem
        for index, tally in sorted(self._choices.items()):
            ids, entry_ids = tally.token_ids, tally.entry_ids
            if any(id is not None for id in entry_ids):
                if not ids:
                    ids = entry_ids
                elif ids != entry_ids:
                    problem = problem or f"choice {index}: token_ids differ from the ids of its log-probs"
            choices.append(
                SampledChoice(index=index, token_ids=ids, logprobs=tally.logprobs, finish_reason=tally.finish_reason)
            )
        return ReplyTokens(prompt_ids=self._prompt_ids, choices=tuple(choices), usage=self._usage, problem=problem)

    def _take(self, data: bytes) -> tuple[bool, bool]:
        """Read one JSON object; returns whether it had choices and whether it had usage."""
        try:
            reply = self._reply.decode(data)
        except msgspec.ValidationError as error:
            self._problem = self._problem or f"a field of the reply has another type: {error}"
            return self._take_loosely(data), False
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._problem = self._problem or f"the reply is not valid JSON: {error}"
            return self._take_loosely(data), False
        if reply.error:
            self.error = _error_text(reply.error)
        elif reply.object == "error":
            self.error = _error_text({"message": reply.message})
        if reply.prompt_token_ids:
            self._take_prompt(reply.prompt_token_ids)
        usage = reply.usage
        if usage is not None and usage.prompt_tokens is not None:
            self._usage = Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens or 0)
        choices = reply.choices
        if not choices:
            return False, usage is not None
        for choice in choices:
            self._take_choice(choice)
        return True, usage is not None

    def _take_choice(self, choice: Any) -> None:
        tally = self._choices.get(choice.index)
        if tally is None:
            tally = self._choices[choice.index] = _Tally()
        if choice.prompt_token_ids:
            self._take_prompt(choice.prompt_token_ids)
        if choice.token_ids:
            tally.token_ids += choice.token_ids
        if choice.logprobs is not None:
            logprobs, entry_ids = self._entries(choice.logprobs)
            tally.logprobs += logprobs
            tally.entry_ids += entry_ids
        if choice.finish_reason is not None:
            tally.finish_reason = choice.finish_reason

    def _take_prompt(self, ids: Ids) -> None:
        if self._prompt_ids is None:
            self._prompt_ids = ids
        elif self._prompt_ids != ids:
            self._problem = self._problem or "choices with different prompts in one call"

    def _take_loosely(self, data: bytes) -> bool:
        """Of a reply with unexpected types, keep that it has choices and whether they ended.

        Python's parser, since agents in Python will use it: it takes ``-Infinity`` and half surrogates.
        """
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError):
            return False
        if not isinstance(reply, dict):
            return False
        if reply.get("error"):
            self.error = _error_text(reply["error"])
        choices = reply.get("choices")
        for position, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                index = choice.get("index")
                tally = self._choices.setdefault(index if isinstance(index, int) else position, _Tally())
                if isinstance(choice.get("finish_reason"), str):
                    tally.finish_reason = choice["finish_reason"]
        return bool(choices)

    def _shown(self, data: bytes) -> bytes:
        """`data` as the agent gets it: without what only the gateway asked for, and under the agent's own name of the
        model. The same object where that changes nothing."""
        model = self._model
        ids, logprobs = TOKEN_IDS in self._hidden, LOGPROBS in self._hidden
        if model is None and not (ids and b"token_ids" in data) and not (logprobs and b'"logprobs"' in data):
            return data
        try:
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
        except (msgspec.DecodeError, RecursionError):
            return data  # a shape we don't know; `_take` has noted it
        return _encode(fields) if changed else data


def _hide_in_choice(choice: Fields, ids: bool, logprobs: bool) -> bool:
    changed = False
    if ids:
        changed = choice.pop("token_ids", None) is not None
        changed |= choice.pop("prompt_token_ids", None) is not None
    if logprobs and choice.get("logprobs", NULL) != NULL:
        choice["logprobs"] = NULL
        changed = True
    return changed


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the upstream sent an error without a message")
