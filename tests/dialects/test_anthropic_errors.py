"""Errors as Anthropic clients read them."""

from __future__ import annotations

import json

import pytest

from dialects.chat_streams import read_event
from outrider.dialects.anthropic_messages import AnthropicMessages
from outrider.dialects.anthropic_native import MessagesReader
from outrider.dialects.anthropic_reply import upstream_error
from outrider.dialects.translate_errors import read_error

OPENAI = (
    "This model's maximum context length is 4608 tokens. However, you requested {} tokens "
    "({} in the messages, {} in the completion)."
)
VLLM = (
    "This model's maximum context length is 4608 tokens. However, you requested 512 output tokens and your prompt "
    "contains {} input tokens, for a total of at least 4609 tokens."
)


def overflow(message, **more):
    body = json.dumps({"error": {"message": message, "code": 400, **more}}).encode()
    return upstream_error(read_error(400, body))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (OPENAI.format(6859, 6347, 512), "prompt is too long: 6347 tokens > 4608 maximum"),
        (
            OPENAI.format(138956, 4000, 131072),
            "input length and `max_tokens` exceed context limit: 4000 + 131072 > 4608, decrease input length or "
            "`max_tokens` and try again",
        ),
        (
            OPENAI.replace("in the messages", "in the prompt").format(6859, 6347, 512),
            "prompt is too long: 6347 tokens > 4608 maximum",
        ),
        (
            "This model's maximum context length is 4608 tokens, however you requested 4612 tokens (600 in your "
            "prompt; 4012 for the completion). Please reduce your prompt; or completion length.",
            "input length and `max_tokens` exceed context limit: 600 + 4012 > 4608, decrease input length or "
            "`max_tokens` and try again",
        ),
        (VLLM.format("5000"), "prompt is too long: 5000 tokens > 4608 maximum"),
        (
            "The input (345516 tokens) is longer than the model's context length (262144 tokens).",
            "prompt is too long: 345516 tokens > 262144 maximum",
        ),
        (
            "The decoder prompt (length 6347) is longer than the maximum model length of 4608.",
            "prompt is too long: 6347 tokens > 4608 maximum",
        ),
    ],
)
def test_R11_a_prompt_that_does_not_fit_is_told_in_the_words_that_agents_match(message, told):
    expected = {"type": "error", "error": {"type": "invalid_request_error", "message": told}}
    assert overflow(message) == expected
    assert json.loads(AnthropicMessages().error(400, message, code="context_length_exceeded")) == expected


def test_R11_a_count_that_the_engine_broke_off_is_not_taken_for_the_prompt():
    """Else an agent would ask again with one token less, again and again."""
    told = overflow(VLLM.format("at least 4097"))["error"]["message"]
    assert told.startswith("prompt is too long: This model's maximum context length is 4608 tokens.")


def test_R11_llama_cpp_gives_numbers_of_their_own():
    body = {"message": "exceeds", "type": "exceed_context_size_error", "n_prompt_tokens": 24071, "n_ctx": 8192}
    assert overflow(body.pop("message"), **body)["error"]["message"] == (
        "prompt is too long: 24071 tokens > 8192 maximum"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "api_error"),
        (529, "overloaded_error"),
    ],
)
def test_errors_have_the_protocols_shape(status, kind):
    dialect = AnthropicMessages()
    expected = {"type": "error", "error": {"type": kind, "message": "why"}}
    assert json.loads(dialect.error(status, "why")) == expected
    assert read_event(MessagesReader().fail(status, "why")) == expected
    body = b'{"error": {"message": "why", "type": "BadRequestError", "code": 400}}'
    assert upstream_error(read_error(status, body)) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"object": "error", "message": "why"}', "why"),
        (b'{"detail": "why"}', "why"),
        (b'{"error": "why"}', "why"),
        (b"<html>why</html>", "<html>why</html>"),
        (b"", "The upstream answered with status 500."),
        (b"\xff", "\ufffd"),
        (b"[1]", "[1]"),
    ],
)
def test_any_error_body_can_be_read(body, message):
    assert upstream_error(read_error(500, body))["error"]["message"] == message
