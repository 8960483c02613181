"""What requests of the two OpenAI text protocols share, and their errors: parsing, sampling overrides.

Fields beyond OpenAI's own are vLLM's: `return_token_ids` in the request; `prompt_token_ids` on the reply or a choice
and `token_ids` on each choice or streamed chunk. Outrider's own engine adds `policy_versions` beside the latter: runs
``[version, number of tokens]``. A chunk without it goes on under the version that was told last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from outrider.dialects.utf8 import check_utf8
from outrider.errors import RequestError
from outrider.types import Json
from outrider.wire import UpstreamRequest, WireRequest

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
TRUE = msgspec.Raw(b"true")

_fields = msgspec.json.Decoder(Fields)
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
        check_utf8(body)  # skipped strings are not checked by the JSON parser
        checked = head.decode(body)
        fields = _fields.decode(body)
        sampling = {name: msgspec.json.decode(fields[name]) for name in SAMPLING & fields.keys()}
    except UnicodeDecodeError as error:
        raise RequestError(f"The request body is not valid UTF-8 (byte {error.start}).") from None
    except msgspec.ValidationError as error:
        raise RequestError(f"The request is not valid: {error}.") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"The request body could not be parsed as JSON: {error}.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    return WireRequest(body=body, fields=fields, model=checked.model, stream=bool(checked.stream), sampling=sampling)


def tree_request(tree: Json, head: type[RequestHead]) -> WireRequest:
    """A request of our own making, as `parse_request` would read it. The messages stay as they are, since there may be
    a lot of them, until `prepare_request` writes them down: its `body` is empty. Raises `RequestError`."""
    try:
        checked = msgspec.convert(tree, head)
    except msgspec.ValidationError as error:
        raise RequestError(f"The request is not valid: {error}.") from None
    fields: dict[str, Any] = {
        name: value if name == "messages" else msgspec.Raw(_encode(value)) for name, value in tree.items()
    }
    sampling = {name: tree[name] for name in SAMPLING & tree.keys()}
    return WireRequest(body=b"", fields=fields, model=checked.model, stream=bool(checked.stream), sampling=sampling)


def decode_fields(
    request: WireRequest, read: Callable[[msgspec.Raw], Any] = msgspec.json.decode, *, of: str = ""
) -> Json:
    """All of them, to look into; the one `of` this name is left to `read`. Raises `RequestError`."""
    try:
        return {name: (read if name == of else msgspec.json.decode)(raw) for name, raw in request.fields.items()}
    except msgspec.DecodeError as error:  # a number beyond a float: it has passed what reads no values
        raise RequestError(f"The request is not valid: {error}.") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None


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
        return UpstreamRequest(body=request.body or _encode(request.fields), sampling=request.sampling)
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
    return raw is not None and bytes(raw) == b"true"


def _decode_or_none(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)


# -- errors ------------------------------------------------------------------------------------------------------------


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    return _encode({"error": {"message": message, "type": _kind(status), "param": param, "code": code}})


def error_event(status: int, message: str, *, code: str | None = None) -> bytes:
    # The SDKs raise on a data line whose object has `error`; the number lets others see the status that was too late.
    error = {"message": message, "type": _kind(status), "param": None, "code": code or status}
    return b"data: " + _encode({"error": error}) + b"\n\n"


def _kind(status: int) -> str:
    return ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
