"""Whether a call can be trusted token by token, and what the reason says when it can't."""

from __future__ import annotations

import pytest

from fakes.engine import Sampled, chunk, entries, plain, stream, usage
from outrider.gateway.capture import capture
from outrider.types import CallState, Fidelity
from outrider.wire import ReplyTokens


def test_T01_ids_swallowed_by_a_tool_parser_make_the_call_broken(engine, gateway):
    first = chunk({"role": "assistant", "content": ""}, token_ids=None) | {"prompt_token_ids": [1, 2, 3]}
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a": 1'}}
    second = chunk({"tool_calls": [call]}, token_ids=[21, 22], logprobs=entries(-1.0, -2.0))
    third = chunk({}, finish_reason="tool_calls", token_ids=[23], logprobs=entries(-3.0))
    engine.answers.append(stream(first, second, third, usage(3, 7)))
    got = gateway.chat(gateway.open(), stream=True)

    assert got.events[1]["choices"][0]["delta"]["tool_calls"] == [call]
    assert got.events[-1] == "[DONE]"
    recorded = gateway.call()
    assert recorded.state is CallState.COMPLETE
    assert recorded.fidelity is Fidelity.BROKEN
    assert "7 completion tokens" in recorded.fidelity_reason
    assert "3 ids" in recorded.fidelity_reason
    assert gateway.client.stats()["broken"] == {"usage": 1}


@pytest.mark.parametrize(("failure", "reason"), [("refused", "unfinished: refused"), ("", "choices: there are none")])
def test_a_prompt_without_an_answer_says_why_there_is_none(failure, reason):
    """Where the gateway made the prompt, its ids are known even if the engine refuses it."""
    captured = capture(ReplyTokens(prompt_ids=[1, 2], choices=(), usage=None), failure=failure)
    assert (captured.fidelity, captured.reason) == (Fidelity.BROKEN, reason)


def test_T10_ids_come_from_the_entries_of_the_log_probs(engine, gateway):
    content = [{"token": "t", "logprob": -0.5 * i, "token_id": 100 + i} for i in range(8)]
    engine.answers.append(plain({"logprobs": {"content": content}}, completion=8))
    gateway.chat(gateway.open())
    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == list(range(100, 108))
    assert len(call.choices[0].logprobs) == 8


BROKEN = {
    "log-probs without ids": ({"logprobs": entries(-1.0, -2.0)}, {}),
    "more log-probs than ids": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0, -3.0)}, {}),
    "fewer log-probs than ids": ({"token_ids": [5, 6], "logprobs": entries(-1.0)}, {}),
    "no log-probs": ({"token_ids": [5, 6]}, {}),
    "an empty finish reason": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0), "finish_reason": ""}, {}),
    "a null id": ({"token_ids": [5, None], "logprobs": entries(-1.0, -2.0)}, {}),
    "a null log-prob": ({"token_ids": [5, 6], "logprobs": entries(-1.0, None)}, {}),
    "a negative id": ({"token_ids": [5, -6], "logprobs": entries(-1.0, -2.0)}, {}),
    "an id of another type": ({"token_ids": [5, "6"], "logprobs": entries(-1.0, -2.0)}, {}),
    "two sources of ids that differ": (
        {
            "token_ids": [5, 6],
            "logprobs": {"content": [{"logprob": -1.0, "token_id": 5}, {"logprob": -1.0, "token_id": 7}]},
        },
        {},
    ),
    "no finish reason": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0), "finish_reason": None}, {}),
    "usage counts more": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}, {"completion": 3}),
    "no usage": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}, {"usage": None}),
    "usage counts another prompt": (
        {"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)},
        {"usage": {"prompt_tokens": 9, "completion_tokens": 2}},
    ),
    "T18 no prompt ids": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}, {"prompt_ids": None}),
    "T18 empty prompt ids": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}, {"prompt_ids": []}),
    "T18 a null prompt id": ({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}, {"prompt_ids": [None, 12, 13]}),
    "prompts that differ": (
        {"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0), "prompt_token_ids": [1, 3]},
        {},
    ),
}


@pytest.mark.parametrize(("choice", "options"), BROKEN.values(), ids=BROKEN.keys())
def test_T10_T18_what_does_not_add_up_is_broken_and_says_why(engine, gateway, choice, options):
    engine.answers.append(plain(choice, **options))
    got = gateway.chat(gateway.open())
    assert got.status == 200
    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.BROKEN
    assert len(call.fidelity_reason) > 10
    assert call.prompt_ids is None or len(call.prompt_ids)


def test_the_same_reply_unbroken_is_exact(engine, gateway):
    engine.answers.append(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}))
    gateway.chat(gateway.open())
    assert gateway.call().fidelity is Fidelity.EXACT, gateway.call().fidelity_reason


def test_T12_ids_of_empty_chunks_and_of_the_stop_string_count(engine, gateway):
    first = chunk({"role": "assistant", "content": ""}) | {"prompt_token_ids": [1, 2]}
    a = chunk({"content": ""}, token_ids=[5, 6], logprobs=entries(-0.5, -0.5))
    b = chunk({"content": "do it\n"}, token_ids=[7], logprobs=entries(-0.5))
    c = chunk({"content": ""}, token_ids=[8, 9], logprobs=entries(-0.5, -0.5), finish_reason="stop")
    c["choices"][0]["stop_reason"] = "OBSERVATION:"
    engine.answers.append(stream(first, a, b, c, usage(2, 5)))
    got = gateway.chat(gateway.open(), stream=True, stop=["OBSERVATION:"])
    assert got.events[3]["choices"][0]["stop_reason"] == "OBSERVATION:"
    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == [5, 6, 7, 8, 9]
    assert call.sampling["stop"] == ["OBSERVATION:"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_T17_the_finish_reason_is_the_engines_whatever_the_last_token_is(engine, gateway, reason):
    engine.sampled = [Sampled(pieces=["a", ""], ids=[5, 7], logprobs=[-1.0, -1.0], finish_reason=reason)]
    gateway.chat(gateway.open())
    assert gateway.call().choices[0].finish_reason == reason


def test_T18_prompt_ids_on_the_first_chunk_without_content_are_kept(engine, gateway):
    first = chunk({"role": "assistant"}) | {"prompt_token_ids": [11, 12, 13]}
    second = chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0), finish_reason="stop")
    engine.answers.append(stream(first, second, usage(3, 1)))
    gateway.chat(gateway.open(), stream=True)
    call = gateway.call()
    assert call.prompt_ids.tolist() == [11, 12, 13]
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason


def test_S07_two_interleaved_choices_keep_their_own_ids(engine, gateway):
    def both(*choices):
        return {"id": "c", "choices": [{"delta": {}, "finish_reason": None, **choice} for choice in choices]}

    tool = {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]}
    chunks = [
        chunk({"role": "assistant"}) | {"prompt_token_ids": [1]},
        both({"index": 0, "token_ids": [10], "logprobs": entries(-1.0)}),
        both({"index": 1, "token_ids": [20], "logprobs": entries(-2.0)}),
        both(
            {"index": 1, "delta": tool, "token_ids": [21], "logprobs": entries(-2.5), "finish_reason": "tool_calls"},
            {"index": 0, "delta": tool, "token_ids": [11], "logprobs": entries(-1.5)},
        ),
        both({"index": 0, "token_ids": [12], "logprobs": entries(-1.75), "finish_reason": "length"}),
        usage(1, 5),
    ]
    engine.answers.append(stream(*chunks))
    gateway.chat(gateway.open(), stream=True, n=2)
    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    found = [(c.index, c.token_ids.tolist(), c.logprobs.tolist(), c.finish_reason) for c in call.choices]
    assert found == [
        (0, [10, 11, 12], [-1.0, -1.5, -1.75], "length"),
        (1, [20, 21], [-2.0, -2.5], "tool_calls"),
    ]
