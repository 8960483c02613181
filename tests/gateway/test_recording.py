"""What is asked of the engine, what the agent gets, and what the store holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from fakes.engine import Answer, Sampled, json_answer, raw_stream, sse, stream
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, wait_for

from outrider.types import CallState, Fidelity, Mode

SAMPLED = Sampled()


def test_a_plain_chat_call_is_stored_exact_and_answered_without_the_tokens(engine, gateway):
    key = gateway.open(sampling={"temperature": 1.0})
    got = gateway.chat(key, temperature=0, seed=7)

    asked = engine.received[0].json
    assert asked["return_token_ids"] is True
    assert asked["logprobs"] is True
    assert got.status == 200
    assert "prompt_token_ids" not in got.json
    choice = got.json["choices"][0]
    assert "token_ids" not in choice
    assert choice["logprobs"] is None
    assert choice["message"]["content"] == SAMPLED.text
    assert choice["message"]["x_future"] == {"a": 1}

    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.prompt_ids.tolist() == [1, 2, 3]
    assert call.prompt_ids.dtype == np.int32
    assert call.choices[0].token_ids.tolist() == list(SAMPLED.ids)
    assert call.choices[0].logprobs.tolist() == list(SAMPLED.logprobs)
    assert call.choices[0].finish_reason == "stop"
    assert call.usage.completion_tokens == 5
    assert call.model == "policy"
    assert call.dialect == "openai_chat"
    assert json.loads(call.request)["temperature"] == 0
    assert "prompt_token_ids" in json.loads(call.response)
    assert call.duration_s > 0
    assert not call.streamed


def test_a_streamed_chat_call_is_stored_exact_and_forwarded_without_the_tokens(engine, gateway):
    got = gateway.chat(gateway.open(), stream=True)

    assert engine.received[0].json["stream_options"] == {"include_usage": True}
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got.events[-1] == "[DONE]"
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in got.events[:-1])
    assert text == SAMPLED.text
    assert b"token_ids" not in got.body
    assert all(event["choices"][0]["logprobs"] is None for event in got.events[:-1])

    call = gateway.call()
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == list(SAMPLED.ids)
    assert call.prompt_ids.tolist() == [1, 2, 3]
    assert call.streamed
    assert call.first_token_s is not None
    assert call.response.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_are_stored_exact_too(engine, gateway, streamed):
    key = gateway.open()
    got = gateway.post(f"/s/{key}{COMPLETIONS}", {"model": "policy", "prompt": [5, 6], "stream": streamed})

    assert engine.received[0].json["logprobs"] == 1
    assert got.status == 200
    assert b"token_ids" not in got.body
    call = gateway.call()
    assert call.dialect == "openai_completions"
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].logprobs.tolist() == list(SAMPLED.logprobs)


def test_what_the_agent_asked_for_is_not_hidden(engine, gateway):
    options = {"include_usage": True}
    got = gateway.chat(gateway.open(), stream=True, logprobs=True, return_token_ids=True, stream_options=options)
    assert got.body == gateway.call().response
    assert got.events[-2]["choices"] == []
    assert got.events[-2]["usage"]["completion_tokens"] == 5


def test_a_plain_answer_with_nothing_to_hide_passes_byte_for_byte(engine, gateway):
    got = gateway.chat(gateway.open(), logprobs=True, return_token_ids=True)
    assert got.body == gateway.call().response


@pytest.mark.parametrize("where", ["bearer", "x-api-key"])
def test_the_key_works_as_api_key_and_is_not_sent_on(engine, gateway, where):
    key = gateway.open()
    headers = {"authorization": f"Bearer {key}"} if where == "bearer" else {"x-api-key": key}
    got = gateway.post(CHAT, {"model": "policy", "messages": MESSAGES}, {**headers, "x-mine": "kept"})
    assert got.status == 200
    assert key not in str(engine.received[0].headers)
    assert engine.received[0].headers["x-mine"] == "kept"
    assert gateway.call().fidelity is Fidelity.EXACT


def test_unknown_request_fields_and_the_query_reach_the_engine(engine, gateway):
    key = gateway.open()
    gateway.post(f"/s/{key}{CHAT}?api-version=1", {"messages": MESSAGES, "extra": 1, "metadata": {"x": 1.50}})
    assert engine.received[0].json["extra"] == 1
    assert b'"metadata":{"x": 1.5}' in engine.received[0].body
    assert engine.received[0].query == "api-version=1"


def test_record_mode_keeps_requests_and_answers_as_they_are(engine, gateway):
    key = gateway.open(mode=Mode.RECORD, sampling={"temperature": 1.0})
    body = b'{"model": "policy",  "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.0}'
    got = gateway.post(f"/s/{key}{CHAT}", body)
    assert engine.received[0].body == body
    call = gateway.call()
    assert got.body == call.response
    assert call.fidelity is Fidelity.TEXT
    assert call.version_start is None


def test_eval_mode_records_tokens(engine, gateway):
    gateway.chat(gateway.open(mode=Mode.EVAL))
    assert gateway.call().fidelity is Fidelity.EXACT


# -- sampling overrides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "Hi"})], ids=["chat", "completions"]
)
@pytest.mark.parametrize("agent", [{"temperature": 0, "seed": 7, "top_p": 0.9}, {}], ids=["sent", "omitted"])
def test_R05_overrides_replace_named_parameters_on_every_api_also_where_omitted(engine, gateway, path, prompt, agent):
    key = gateway.open(sampling={"temperature": 0.7})
    gateway.post(f"/s/{key}{path}", {**prompt, **agent})
    asked = engine.received[0].json
    assert asked["temperature"] == 0.7
    assert asked.get("seed") == agent.get("seed")
    assert gateway.call().sampling == {**agent, "temperature": 0.7}


def test_R05_overriding_one_name_of_a_parameter_removes_the_other(engine, gateway):
    gateway.chat(gateway.open(sampling={"max_tokens": 8}), max_completion_tokens=4096)
    asked = engine.received[0].json
    assert asked["max_tokens"] == 8
    assert "max_completion_tokens" not in asked
    assert gateway.call().sampling == {"max_tokens": 8}


# -- fidelity ----------------------------------------------------------------------------------------------------------


def chunk(delta, **fields):
    choice = {"index": 0, "delta": delta, **fields}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def entries(*values):
    return {"content": [{"token": "t", "logprob": value} for value in values]}


def usage(prompt, completion):
    numbers = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "c", "choices": [], "usage": numbers}


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


def plain(choice, prompt_ids=(1, 2), completion=2, **fields):
    numbers = {"prompt_tokens": len(prompt_ids or ()), "completion_tokens": completion, "total_tokens": 0}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", **choice}
    return json_answer({"id": "c", "choices": [choice], "usage": numbers, "prompt_token_ids": prompt_ids, **fields})


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
    if "token_ids" in choice or options.get("prompt_ids", True):
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


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
def test_S03_the_usage_chunk_is_shown_only_to_an_agent_that_asked(engine, gateway, asked):
    a = chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0), finish_reason="stop") | {"prompt_token_ids": [1]}
    empty = {"id": "", "model": "", "choices": []}
    bare = {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    engine.answers.append(stream(empty, a, usage(1, 1), bare))
    options = {"stream_options": {"include_usage": True}} if asked else {}
    got = gateway.chat(gateway.open(), stream=True, **options)
    shown = [event for event in got.events[:-1] if "usage" in event]
    assert shown == ([usage(1, 1), bare] if asked else [])
    assert got.events[0] == empty
    call = gateway.call()
    assert call.usage.completion_tokens == 1
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason


def test_S03_other_stream_options_of_the_agent_survive(engine, gateway):
    gateway.chat(gateway.open(), stream=True, stream_options={"continuous_usage_stats": False})
    assert engine.received[0].json["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}


def test_S01_a_character_cut_by_a_network_read_arrives_whole(engine, gateway):
    body = b"".join(sse(chunk({"content": "n\u00e9 \U0001f600 a\u2028b\u0085c"}, finish_reason="stop")))
    cut = body.index("\U0001f600".encode()) + 2
    engine.answers.append(raw_stream(body[:cut], body[cut:], chunk_delay_s=0.05))
    key = gateway.open(mode=Mode.RECORD)
    got = gateway.chat(key, stream=True)
    assert got.body == body
    assert gateway.call().response == body
    assert got.events[0]["choices"][0]["delta"]["content"] == "n\u00e9 \U0001f600 a\u2028b\u0085c"


def test_S02_comments_odd_framing_and_a_missing_end_are_read_as_meant(engine, gateway):
    a = json.dumps(chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)) | {"prompt_token_ids": [1]})
    b = json.dumps(chunk({}, token_ids=[6], logprobs=entries(-2.0), finish_reason="stop"))
    head, tail = b[: len(b) // 2].rsplit(" ", 1)
    two_lines = f"event: x\nid: 3\ndata: {head}\ndata: {tail}{b[len(b) // 2:]}\n\n"
    body = f": ping\n\n:\n\ndata:{a}\r\n\r\n{two_lines}data: {json.dumps(usage(1, 2))}".encode()
    engine.answers.append(raw_stream(body[:40], body[40:90], body[90:], chunk_delay_s=0.02))
    got = gateway.chat(gateway.open(), stream=True)
    call = gateway.call()
    assert call.state is CallState.COMPLETE
    assert call.fidelity is Fidelity.EXACT, call.fidelity_reason
    assert call.choices[0].token_ids.tolist() == [5, 6]
    assert call.response == body
    assert b"token_ids" not in got.body


def test_S02_an_end_without_a_finish_reason_is_a_failure_and_is_told(engine, gateway):
    engine.answers.append(stream(chunk({"content": "a"}, token_ids=[5], logprobs=entries(-1.0)), done=False))
    got = gateway.chat(gateway.open(), stream=True)
    assert "ended before" in got.events[-1]["error"]["message"]
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.fidelity is Fidelity.BROKEN


def test_R13_unknown_fields_survive_both_ways_in_a_stream(engine, gateway):
    strange = chunk({"content": "a", "reasoning_content": "hm"}, finish_reason="stop", stop_reason=7)
    strange |= {"x_future": {"a": 1}, "prompt_token_ids": [1]}
    strange["choices"][0] |= {"token_ids": [5], "logprobs": entries(-1.0), "x_other": [1.50]}
    engine.answers.append(stream(strange, usage(1, 1)))
    got = gateway.chat(gateway.open(), stream=True, extra=1, return_token_ids=False)
    assert engine.received[0].json["extra"] == 1
    assert engine.received[0].json["return_token_ids"] is True
    shown = got.events[0]
    assert shown["x_future"] == {"a": 1}
    assert shown["choices"][0]["delta"] == {"content": "a", "reasoning_content": "hm"}
    assert shown["choices"][0]["stop_reason"] == 7
    assert shown["choices"][0]["x_other"] == [1.5]
    assert "prompt_token_ids" not in shown
    assert "token_ids" not in shown["choices"][0]
    assert gateway.call().fidelity is Fidelity.EXACT


def test_an_engine_that_answers_a_stream_request_with_a_whole_body_is_recorded(engine, gateway):
    engine.answers.append(plain({"token_ids": [5, 6], "logprobs": entries(-1.0, -2.0)}))
    got = gateway.chat(gateway.open(), stream=True)
    assert got.json["choices"][0]["message"]["content"] == "x"
    assert gateway.call().fidelity is Fidelity.EXACT


# -- policy versions ---------------------------------------------------------------------------------------------------


def test_R12_calls_carry_the_version_at_their_start_and_end(engine, gateway, tmp_path):
    import threading

    key = gateway.open()
    gateway.client.resume(3)
    gateway.chat(key)
    gate = threading.Event()
    chunks = [chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="stop")]
    engine.answers.append(stream(*chunks, gate=gate))
    raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES, "stream": True})
    wait_for(lambda: len(engine.received) == 2)
    gateway.client.resume(4)
    gate.set()
    gateway.recorded(2)
    raw.close()
    gateway.chat(key)
    assert [(c.version_start, c.version_end) for c in gateway.recorded(3)] == [(3, 3), (3, 4), (4, 4)]
    assert gateway.store.value("policy_version") == "4"


def test_R12_only_a_resume_counts(engine, gateway):
    gateway.client.resume(1)
    assert gateway.client.pause(1.0) == 0
    assert gateway.client.health()["policy_version"] == 1
    assert gateway.client.pause(1.0) == 0
    gateway.client.resume(1)
    assert gateway.client.health()["policy_version"] == 1
    gateway.chat(gateway.open())
    assert gateway.call().version_start == 1


def test_without_a_resume_there_is_no_version(gateway):
    gateway.chat(gateway.open())
    assert gateway.call().version_start is None


# -- the upstream's own errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_an_upstream_error_passes_through_and_is_stored_as_failed(engine, gateway, status):
    body = b'{"error":  {"message": "no", "code": "context_length_exceeded"}}'
    headers = {"content-type": "application/json", "retry-after": "7", "x-request-id": "r"}
    engine.answers.append(Answer(status=status, headers=headers, chunks=[body]))
    got = gateway.chat(gateway.open())
    assert (got.status, got.body) == (status, body)
    assert got.headers["retry-after"] == "7"
    assert got.headers["x-request-id"] == "r"
    call = gateway.call()
    assert call.state is CallState.FAILED
    assert call.status == status
    assert call.response == body
    assert call.fidelity is not Fidelity.EXACT
