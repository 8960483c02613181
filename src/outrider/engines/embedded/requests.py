"""Request bodies of the OpenAI API, checked. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from outrider.engines.embedded.sampling import Sampling
from outrider.engines.embedded.vocabulary import TemplateError, Vocabulary
from outrider.types import Json

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MIN_TEMPERATURE = 1e-3
SEED_LIMIT = 2**63


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests are checked against."""

    model: str
    max_model_len: int
    vocabulary: int
    """Token ids lie below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A request that can be served."""

    chat: bool
    prompts: list[list[int]]
    sampling: Sampling
    n: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: bool
    ignored: tuple[str, ...] = ()
    """Fields that ask for a form of answer which this engine cannot force; the model may still give it."""


def parse_body(data: bytes) -> Json:
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"The body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("The body must be a JSON object.")
    return body


def parse_chat(body: Json, vocabulary: Vocabulary, limits: Limits) -> Parsed:
    """A ``/v1/chat/completions`` body. Raises `ApiError`."""
    _check_model(body, limits)
    _check_unsupported(body)
    messages = _messages(body)
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) and choice not in (None, "auto", "none", "required"):
        raise ApiError("tool_choice: must be 'auto', 'none', 'required' or an object.", param="tool_choice")
    tools = _field(body, "tools", list, None) if choice != "none" else None
    extra = dict(_field(body, "chat_template_kwargs", dict, {}))
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in body:
            extra[name] = _field(body, name, bool, False)
    wants = _field(body, "logprobs", bool, False)
    top = _number(body, "top_logprobs", int, 0, 0, MAX_TOP_LOGPROBS)
    if top and not wants:
        raise ApiError("top_logprobs: needs logprobs to be true.", param="top_logprobs")
    try:
        prompt = vocabulary.render(messages, tools, extra)
    except TemplateError as error:
        raise ApiError(f"messages: {error}", param="messages") from error
    parsed = _parsed(body, [prompt], limits, chat=True, logprobs=wants, top=top)
    wishes = {"tool_choice": choice not in (None, "auto", "none"), "response_format": _wants_format(body)}
    return replace(parsed, ignored=tuple(name for name, asked in wishes.items() if asked))


def parse_completion(body: Json, vocabulary: Vocabulary, limits: Limits) -> Parsed:
    """A ``/v1/completions`` body. Raises `ApiError`."""
    _check_model(body, limits)
    _check_unsupported(body)
    for name in ("echo", "suffix"):
        if body.get(name):
            raise ApiError(f"{name}: not supported by this engine; leave it out.", param=name)
    top = _number(body, "logprobs", int, -1, 0, MAX_TOP_LOGPROBS)
    prompts = [_prompt_ids(item, vocabulary, limits) for item in _prompt_items(body)]
    parsed = _parsed(body, prompts, limits, chat=False, logprobs=top >= 0, top=max(top, 0))
    return replace(parsed, ignored=("response_format",) if _wants_format(body) else ())


def _parsed(body: Json, prompts: list[list[int]], limits: Limits, *, chat: bool, logprobs: bool, top: int) -> Parsed:
    stream = _field(body, "stream", bool, False)
    options = _field(body, "stream_options", dict, {})
    if options and not stream:
        raise ApiError("stream_options: only with stream set to true.", param="stream_options")
    temperature = _number(body, "temperature", float, 1.0, 0.0, 100.0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise ApiError(f"temperature: give 0 for greedy or at least {MIN_TEMPERATURE}.", param="temperature")
    top_p = _number(body, "top_p", float, 1.0, 0.0, 1.0)
    if top_p == 0:
        raise ApiError("top_p: must be above 0.", param="top_p")
    seed = _number(body, "seed", int, None, -SEED_LIMIT, SEED_LIMIT)
    sampling = Sampling(
        max_tokens=_max_tokens(body, prompts, limits, chat=chat),
        temperature=temperature,
        top_p=top_p,
        top_k=max(_number(body, "top_k", int, 0, -1, None), 0),
        seed=seed,
        stop=_stops(body),
        stop_token_ids=frozenset(_ids(body.get("stop_token_ids") or [], "stop_token_ids", limits)),
        ignore_eos=_field(body, "ignore_eos", bool, False),
        skip_special_tokens=_field(body, "skip_special_tokens", bool, True),
        top_logprobs=top,
    )
    return Parsed(
        chat=chat,
        prompts=prompts,
        sampling=sampling,
        n=_number(body, "n", int, 1, 1, MAX_CHOICES),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        return_token_ids=_field(body, "return_token_ids", bool, False),
        logprobs=logprobs,
    )


def _max_tokens(body: Json, prompts: Sequence[Sequence[int]], limits: Limits, *, chat: bool) -> int:
    """The most tokens to sample: as asked, else what the window leaves.

    A value of the whole window or more cannot be meant as it stands, since no prompt would fit beside it; it is cut to
    what is left, so that an agent that always sends it is not refused for ever.
    """
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _number(body, name, int, None, 1, None)
    window, longest = limits.max_model_len, max(len(prompt) for prompt in prompts)
    for prompt in prompts:
        if not prompt:
            raise ApiError("The prompt has no tokens.", param="messages" if chat else "prompt")
    over = longest >= window or (asked is not None and asked < window and longest + asked > window)
    if over:
        place = "messages" if chat else "prompt"
        reply = asked if asked is not None else 1
        raise ApiError(
            f"This model's maximum context length is {window} tokens. However, you requested {longest + reply} tokens "
            f"({longest} in the {place}, {reply} in the completion). Please reduce the length of the {place} or "
            "completion.",
            param=place,
            code="context_length_exceeded",
        )
    return min(asked if asked is not None else window, window - longest)


def _check_model(body: Json, limits: Limits) -> None:
    model = body.get("model")
    if model is not None and model != limits.model:
        raise ApiError(
            f"The model {model!r} does not exist; this engine serves {limits.model!r}.",
            param="model",
            code="model_not_found",
            status=404,
        )


# What would change the sampled distribution or the answer, and is not implemented: refused rather than ignored.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "prompt_logprobs": (None,),
    "functions": (None, []),
}


def _wants_format(body: Json) -> bool:
    kind = _field(body, "response_format", dict, {"type": "text"}).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError("response_format: type must be text, json_object or json_schema.", param="response_format")
    return bool(kind != "text")


def _check_unsupported(body: Json) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise ApiError(f"{name}: not supported by this engine; leave it out.", param=name)


def _field(body: Json, name: str, kind: type[Any], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        names = {list: "a list", dict: "an object", bool: "true or false", str: "a string"}
        raise ApiError(f"{name}: must be {names[kind]}.", param=name)
    return value


def _number(body: Json, name: str, kind: type, default: Any, low: float | None, high: float | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ApiError(f"{name}: must be {'a whole number' if kind is int else 'a number'}.", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise ApiError(f"{name}: is {value}, must be {bounds}.", param=name)
    return kind(value)


def _stops(body: Json) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise ApiError("stop: must be a string or a list of strings.", param="stop")
    if len(stops) > MAX_STOPS:
        raise ApiError(f"stop: at most {MAX_STOPS} strings.", param="stop")
    return tuple(item for item in stops if item)


def _messages(body: Json) -> list[Json]:
    messages = _field(body, "messages", list, None)
    if not messages:
        raise ApiError("messages: must be a list with at least one message.", param="messages")
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(f"{where}: must be an object with a role.", param=where)
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                    raise ApiError(f"{where}.content: only text parts are supported.", param=f"{where}.content")
        elif content is not None and not isinstance(content, str):
            raise ApiError(f"{where}.content: must be a string or a list of text parts.", param=f"{where}.content")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise ApiError(f"{where}.tool_calls: must be a list of objects.", param=f"{where}.tool_calls")
    return list(messages)


def _prompt_items(body: Json) -> list[Any]:
    """`prompt` is one text, one list of ids, or a list of either."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError("prompt: must be a text, a list of token ids, or a list of these.", param="prompt")
    return prompt if isinstance(prompt[0], str | list) else [prompt]


def _prompt_ids(item: Any, vocabulary: Vocabulary, limits: Limits) -> list[int]:
    return vocabulary.encode(item) if isinstance(item, str) else _ids(item, "prompt", limits)


def _ids(items: Any, name: str, limits: Limits) -> list[int]:
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise ApiError(f"{name}: must be a list of token ids.", param=name)
    wrong = next((item for item in items if not 0 <= item < limits.vocabulary), None)
    if wrong is not None:
        raise ApiError(f"{name}: token id {wrong} is outside the vocabulary of {limits.vocabulary}.", param=name)
    return items
