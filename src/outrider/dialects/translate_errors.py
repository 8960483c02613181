"""What an upstream's error says, in particular that a prompt does not fit, and how agents expect to be told.

Agents match on the text: it decides whether they compact their context, ask for fewer tokens, or give up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

OVERFLOW_CODE = "context_length_exceeded"

_OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|maximum model length|context length \(\d"
    r"|model's context length|context window|available context size|prompt is too long|exceed context limit",
    re.IGNORECASE,
)
_LIMITS = (
    r"maximum context length (?:is|of) (\d+)",
    r"maximum model length (?:of|is) (\d+)",
    r"context length \((\d+)",
    r"context size \((\d+)",
    r"> (\d+)",
)
_PROMPTS = (
    r"(\d+) in (?:the|your) (?:messages|prompt)",
    r"(\d+) tokens from the input",
    r"resulted in (\d+) tokens",
    r"\(length (\d+)\)",
    r"input \((\d+) tokens",
    r"request \((\d+) tokens",
    r"too long: (\d+) tokens",
    r"limit: (\d+) \+",
    r"(?<!at least )\b(\d+) input tokens",  # "at least" is where vLLM stopped counting
)
_COMPLETIONS = (
    r"(\d+) (?:in|for) the completion",
    r"(\d+) tokens for the completion",
    r"(\d+) output tokens",
    r"limit: \d+ \+ (\d+)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A prompt, with the answer that was asked for, is longer than the model's context. Counts are in tokens."""

    prompt: int | None = None
    completion: int | None = None
    limit: int | None = None

    @property
    def prompt_fits(self) -> bool:
        """The prompt alone would fit: fewer tokens to answer with would do."""
        return self.prompt is not None and self.limit is not None and self.prompt < self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamProblem:
    status: int
    message: str
    code: str | None = None
    overflow: Overflow | None = None


def read_error(status: int, body: bytes) -> UpstreamProblem:
    """Read an error body of an OpenAI-compatible upstream; never raises, whatever it is."""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    error: Any = found.get("error", found) if isinstance(found, dict) else None
    fields: dict[str, Any] = error if isinstance(error, dict) else {"message": error}
    message = fields.get("message") or fields.get("detail") or body[:500].decode("utf-8", "replace").strip()
    message = message if isinstance(message, str) else str(message)
    code = fields.get("code")
    code = code if isinstance(code, str) else None
    overflow = None
    words = f"{code} {fields.get('type')} {message}"
    if 400 <= status < 500 and _OVERFLOW.search(words):
        overflow = Overflow(
            prompt=_whole(fields.get("n_prompt_tokens")) or _number(_PROMPTS, message),
            completion=_number(_COMPLETIONS, message),
            limit=_whole(fields.get("n_ctx")) or _number(_LIMITS, message),
        )
        status, code = 400, OVERFLOW_CODE
    return UpstreamProblem(
        status=status, message=message or f"The upstream answered with status {status}.", code=code, overflow=overflow
    )


def anthropic_wording(problem: UpstreamProblem) -> str:
    overflow = problem.overflow
    if overflow is None:
        return problem.message
    if overflow.prompt_fits and overflow.completion is not None:
        return (
            f"input length and `max_tokens` exceed context limit: {overflow.prompt} + {overflow.completion} > "
            f"{overflow.limit}, decrease input length or `max_tokens` and try again"
        )
    if overflow.prompt is not None and overflow.limit is not None:
        return f"prompt is too long: {overflow.prompt} tokens > {overflow.limit} maximum"
    return f"prompt is too long: {problem.message}"


def openai_wording(problem: UpstreamProblem) -> str:
    overflow = problem.overflow
    if overflow is None or "maximum context length" in problem.message:
        return problem.message
    if overflow.limit is None or overflow.prompt is None:
        return f"Your input exceeds the context window of this model. {problem.message}"
    asked = f"your messages resulted in {overflow.prompt} tokens"
    if overflow.completion is not None:
        total = overflow.prompt + overflow.completion
        asked = (
            f"you requested {total} tokens ({overflow.prompt} in the messages, {overflow.completion} in the completion)"
        )
    return (
        f"This model's maximum context length is {overflow.limit} tokens. However, {asked}. "
        "Please reduce the length of the messages or completion."
    )


def _number(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return int(match[1])
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
