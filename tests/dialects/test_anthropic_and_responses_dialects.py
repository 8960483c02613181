"""The two translating dialects behind `wire.Dialect`, as the relay uses them."""

from __future__ import annotations

import json

import pytest

from dialects.chat_streams import USAGE, call_delta, calls, chunk, end, plain
from outrider.dialects.anthropic_messages import AnthropicMessages
from outrider.dialects.openai_responses import OpenAIResponses
from outrider.dialects.openai_responses_history import RecentResponses
from outrider.dialects.translate_dialect import TranslatedReader, TranslatedRequest
from outrider.errors import RequestError
from outrider.types import Usage
from outrider.wire import Event

MESSAGES = {"model": "m", "max_tokens": 64, "temperature": 0.3, "messages": [{"role": "user", "content": "go"}]}
RESPONSES = {"model": "m", "max_output_tokens": 64, "temperature": 0.3, "input": "go"}
BOTH = [(AnthropicMessages, MESSAGES), (OpenAIResponses, RESPONSES)]


def event(data):
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return Event(b"data: " + text + b"\n\n", text)


def open_call(dialect, body, *, overrides=None, tokens=True):
    request = dialect.parse(json.dumps(body).encode())
    prepared = dialect.prepare(request, overrides=overrides or {}, tokens=tokens)
    return prepared, dialect.reader(prepared)


def exact(one, ids):
    for choice in one["choices"]:
        choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5} for _ in ids]}
    return one


def names(raw):
    return [part.split(b"\n")[0].removeprefix(b"event: ").decode() for part in raw.split(b"\n\n") if part]


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_the_upstream_gets_a_chat_request_with_overrides_and_the_wish_for_tokens(kind, body):
    prepared, reader = open_call(kind(), {**body, "stream": True}, overrides={"temperature": 1.0})
    assert isinstance(prepared, TranslatedRequest)
    assert isinstance(reader, TranslatedReader)
    assert prepared.path == "/v1/chat/completions"
    sent = json.loads(prepared.body)
    assert sent["messages"] == [{"role": "user", "content": "go"}]
    assert (sent["temperature"], sent["max_tokens"], sent["return_token_ids"], sent["logprobs"]) == (
        1.0,
        64,
        True,
        True,
    )
    assert sent["stream_options"] == {"include_usage": True}
    assert prepared.sampling == {"temperature": 1.0, "max_tokens": 64}


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_stream_is_read_for_its_tokens_and_shown_in_the_clients_protocol(kind, body):
    _, reader = open_call(kind(), {**body, "stream": True})
    first = exact(chunk({"role": "assistant", "content": "Hi"}, prompt_token_ids=[1, 2, 3]), [21, 22])
    shown = reader.event(event(first))
    assert b"token_ids" not in shown
    assert b"-0.5" not in shown
    assert reader.event(Event(b": ping\n\n", b"")) == b": ping\n\n"
    for one in end():
        shown += reader.event(event(one))
    assert (reader.terminal, reader.finished, reader.error) == (False, True, "")
    last = reader.event(event(b"[DONE]"))
    assert reader.terminal
    assert names(shown + last)[0] in ("message_start", "response.created")
    assert names(last)[-1] in ("message_stop", "response.completed")
    assert names(shown)[-1] not in ("message_stop", "response.completed")
    assert reader.end() == b""
    found = reader.result()
    assert (list(found.prompt_ids), found.choices[0].token_ids) == ([1, 2, 3], [21, 22])
    assert found.choices[0].logprobs == [-0.5, -0.5]
    assert found.usage == Usage(prompt_tokens=9, completion_tokens=5)


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_stream_that_ends_without_done_still_owes_its_end(kind, body):
    _, reader = open_call(kind(), {**body, "stream": True})
    for one in [chunk({"content": "Hi"}), *end()]:
        reader.event(event(one))
    assert names(reader.end())[-1] in ("message_stop", "response.completed")


@pytest.mark.parametrize(("kind", "body"), BOTH)
@pytest.mark.parametrize("broken", [b"{", b"[1]", b'{"error": {"message": "engine dead"}}'])
def test_S09_what_is_no_chunk_ends_the_stream_with_an_error(kind, body, broken):
    _, reader = open_call(kind(), {**body, "stream": True})
    reader.event(event(chunk({"content": "Hi"}, prompt_token_ids=[1])))
    shown = reader.event(event(broken))
    assert names(shown) in (["error"], ["response.failed"])
    assert reader.error
    assert reader.event(event(b"[DONE]")) == b""


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_cut_stream_can_be_told_of(kind, body):
    _, reader = open_call(kind(), {**body, "stream": True})
    reader.event(event(chunk({"content": "Hi"}, prompt_token_ids=[1])))
    assert names(reader.fail(502, "Upstream: cut.")) in (["error"], ["response.failed"])


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_plain_answer_is_read_and_translated(kind, body):
    _, reader = open_call(kind(), body)
    reply = plain({"content": "Hi"}, prompt_token_ids=[1, 2, 3])
    answer = json.loads(reader.body(json.dumps(exact(reply, [21])).encode()))
    text = answer["content"][0] if "content" in answer else answer["output"][0]["content"][0]
    assert text["text"] == "Hi"
    assert (reader.finished, reader.error) == (True, "")
    assert reader.result().choices[0].token_ids == [21]


@pytest.mark.parametrize(("kind", "body"), BOTH)
@pytest.mark.parametrize("reply", [b"{", b"[]", b'{"choices": []}', b'{"error": {"message": "engine dead"}}'])
def test_what_is_no_plain_answer_is_an_error(kind, body, reply):
    _, reader = open_call(kind(), body)
    assert "error" in json.loads(reader.body(reply))
    assert reader.error


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_R11_an_upstreams_refusal_is_told_in_the_clients_protocol(kind, body):
    _, reader = open_call(kind(), body)
    message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    status, told, streamed = reader.error_body(400, json.dumps({"object": "error", "message": message}).encode())
    assert (status, streamed) == (400, False)
    assert ("prompt is too long: 9 tokens > 8 maximum" in told.decode()) is (kind is AnthropicMessages)
    assert ('"code":"context_length_exceeded"' in told.decode()) is (kind is OpenAIResponses)


def test_R11_codex_looks_for_a_long_prompt_inside_the_stream():
    _, reader = open_call(OpenAIResponses(), {**RESPONSES, "stream": True})
    message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    status, told, streamed = reader.error_body(400, json.dumps({"object": "error", "message": message}).encode())
    assert (status, streamed) == (200, True)
    assert names(told) == ["response.created", "response.in_progress", "error", "response.failed"]
    events = [json.loads(part.split(b"\ndata: ")[1]) for part in told.split(b"\n\n") if part]
    assert [one["sequence_number"] for one in events] == [0, 1, 2, 3]
    assert events[2]["code"] == events[3]["response"]["error"]["code"] == "context_length_exceeded"
    for other in (b'{"error": {"message": "no such model"}}', b"?"):
        _, reader = open_call(OpenAIResponses(), {**RESPONSES, "stream": True})
        assert reader.error_body(404, other)[::2] == (404, False)


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_mistake_is_found_before_anything_is_sent(kind, body):
    with pytest.raises(RequestError, match=r"temperature|Expected"):
        open_call(kind(), {**body, "temperature": "hot"})
    with pytest.raises(RequestError, match="tools"):
        open_call(kind(), {**body, "tools": [3]})


def test_A04_without_token_ids_the_count_is_estimated_so_that_the_stream_is_not_held_up():
    prepared, reader = open_call(AnthropicMessages(), {**MESSAGES, "stream": True}, tokens=False)
    shown = reader.event(event(chunk({"content": "Hi"})))
    assert names(shown)[0] == "message_start"
    start = json.loads(shown.split(b"\n")[1].removeprefix(b"data: "))
    assert start["message"]["usage"]["input_tokens"] == prepared.prompt_tokens > 0


def test_A07_count_tokens_asks_the_upstream_for_one_token_and_reads_the_prompts_length():
    dialect = AnthropicMessages()
    counted = {name: value for name, value in MESSAGES.items() if name != "max_tokens"}
    prepared = dialect.count_request(json.dumps(counted).encode(), model="policy")
    asked = json.loads(prepared.body)
    assert prepared.path == "/v1/chat/completions"
    assert (asked["messages"], asked["max_tokens"], asked["model"]) == (MESSAGES["messages"], 1, "policy")
    reply = json.dumps(plain({"content": "x"})).encode()
    assert dialect.count_reply(200, reply)[:2] == (200, b'{"input_tokens":%d}' % USAGE["prompt_tokens"])


def test_A07_a_prompt_that_is_too_long_is_counted_and_other_errors_are_told():
    count = AnthropicMessages().count_reply
    message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    assert count(400, json.dumps({"message": message}).encode())[:2] == (200, b'{"input_tokens":9}')
    status, body, _ = count(429, b'{"error": {"message": "slow down"}}')
    assert (status, json.loads(body)["error"]) == (429, {"type": "rate_limit_error", "message": "slow down"})
    status, body, _ = count(200, b'{"usage": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001)
    assert (status, json.loads(body)["error"]["type"]) == (502, "api_error")
    status, body, _ = count(200, b'{"usage": {}}')
    assert (status, json.loads(body)["error"]["type"]) == (502, "api_error")


@pytest.mark.parametrize("streamed", [True, False])
def test_a_response_can_be_named_by_the_next_request(streamed):
    dialect = OpenAIResponses()
    _, reader = open_call(dialect, {**RESPONSES, "stream": streamed})
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    if streamed:
        shown = reader.event(event(calls(call_delta(0, "c", "read", "{}"))))
        for one in end("tool_calls"):
            reader.event(event(one))
        reader.end()
        id = json.loads(shown.split(b"\n")[1].removeprefix(b"data: "))["response"]["id"]
    else:
        id = json.loads(reader.body(json.dumps(plain({"tool_calls": [call]}, "tool_calls")).encode()))["id"]
    output = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    prepared, _ = open_call(dialect, {**RESPONSES, "input": [output], "previous_response_id": id})
    assert json.loads(prepared.body)["messages"] == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
    ]


def test_nobody_can_name_another_owners_response():
    dialect = OpenAIResponses()

    def named(owner, id):
        request = dialect.parse(json.dumps({**RESPONSES, "previous_response_id": id}).encode())
        return dialect.prepare(request, overrides={}, tokens=True, owner=owner)

    prepared = dialect.prepare(dialect.parse(json.dumps(RESPONSES).encode()), overrides={}, tokens=True, owner="a")
    id = json.loads(dialect.reader(prepared).body(json.dumps(plain({"content": "secret"})).encode()))["id"]
    assert b"secret" in named("a", id).body
    for other in ("b", ""):
        with pytest.raises(RequestError, match="not found"):
            named(other, id)


def test_a_request_that_is_too_large_to_be_kept_is_not_held_until_the_answer_has_come():
    dialect = OpenAIResponses(history=RecentResponses(max_bytes=4000))
    for length, held in ((100, True), (1000, False)):
        prepared, reader = open_call(dialect, {**RESPONSES, "input": "x" * length})
        assert isinstance(prepared, TranslatedRequest)
        assert bool(prepared.translation.state.items) is held
        assert b"Hi" in reader.body(json.dumps(plain({"content": "Hi"})).encode())


def test_a_response_that_is_not_to_be_stored_is_forgotten():
    dialect = OpenAIResponses()
    _, reader = open_call(dialect, {**RESPONSES, "store": False})
    id = json.loads(reader.body(json.dumps(plain({"content": "Hi"})).encode()))["id"]
    with pytest.raises(RequestError, match="not found"):
        open_call(dialect, {**RESPONSES, "previous_response_id": id})


# -- an upstream that speaks the dialect itself ------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_to_an_upstream_of_the_same_protocol_the_bytes_go_as_they_are(kind, body):
    dialect = kind(native=True)
    raw = json.dumps({**body, "x_future": {"a": 1}}, indent=1).encode()
    request = dialect.parse(raw)
    assert dialect.prepare(request, overrides={}, tokens=True).body is raw
    over = json.loads(dialect.prepare(request, overrides={"max_tokens": 5, "temperature": 1.0}, tokens=True).body)
    name = "max_tokens" if kind is AnthropicMessages else "max_output_tokens"
    assert over == {**body, "x_future": {"a": 1}, "temperature": 1.0, name: 5}


def native_event(one):
    kind, data = one["type"].encode(), json.dumps(one).encode()
    return Event(b"event: %b\ndata: %b\n\n" % (kind, data), data, kind)


def native_events(*events):
    return [native_event(one) for one in events]


def test_native_messages_are_read_for_their_end_and_usage():
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 1}
    message = {"type": "message", "content": [], "stop_reason": None, "usage": usage}
    _, reader = open_call(AnthropicMessages(native=True), {**MESSAGES, "stream": True})
    start, delta, stop = native_events(
        {"type": "message_start", "message": message},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 8}},
        {"type": "message_stop"},
    )
    assert reader.event(start) is start.raw
    assert not reader.finished
    assert reader.event(delta) is delta.raw
    assert (reader.finished, reader.terminal) == (True, False)
    assert reader.event(stop) is stop.raw
    assert reader.terminal
    found = reader.result()
    assert found.usage == Usage(prompt_tokens=9, completion_tokens=8)
    assert found.choices[0].finish_reason == "end_turn"
    _, reader = open_call(AnthropicMessages(native=True), MESSAGES)
    raw = json.dumps({**message, "stop_reason": "max_tokens"}).encode()
    assert reader.body(raw) is raw
    assert reader.result().choices[0].finish_reason == "max_tokens"


def test_native_responses_are_read_for_their_end_and_usage():
    response = {"status": "completed", "usage": {"input_tokens": 9, "output_tokens": 8}, "error": None}
    _, reader = open_call(OpenAIResponses(native=True), {**RESPONSES, "stream": True})
    delta, done = native_events(
        {"type": "response.output_text.delta", "delta": "x"}, {"type": "response.completed", "response": response}
    )
    assert reader.event(delta) is delta.raw
    assert not reader.finished
    assert reader.event(done) is done.raw
    assert (reader.finished, reader.terminal) == (True, True)
    assert reader.result().usage == Usage(prompt_tokens=9, completion_tokens=8)
    _, reader = open_call(OpenAIResponses(native=True), RESPONSES)
    raw = json.dumps(response).encode()
    assert reader.body(raw) is raw
    assert reader.finished


@pytest.mark.parametrize(
    ("kind", "body", "failure"),
    [
        (AnthropicMessages, MESSAGES, {"type": "error", "error": {"type": "api_error", "message": "dead"}}),
        (OpenAIResponses, RESPONSES, {"type": "error", "sequence_number": 3, "message": "dead"}),
        (
            OpenAIResponses,
            RESPONSES,
            {"type": "response.failed", "response": {"status": "failed", "error": {"message": "dead"}}},
        ),
    ],
)
def test_S09_native_errors_are_seen(kind, body, failure):
    _, reader = open_call(kind(native=True), {**body, "stream": True})
    (one,) = native_events(failure)
    assert reader.event(one) is one.raw
    assert reader.error == "dead"
    assert not reader.finished


@pytest.mark.parametrize(("kind", "body"), BOTH)
def test_a_native_reply_that_can_not_be_read_is_passed_on(kind, body):
    _, reader = open_call(kind(native=True), body)
    assert reader.body(b"{") == b"{"
    assert reader.event(Event(b"data: {\n\n", b"{")) == b"data: {\n\n"
    found = reader.result()
    assert (found.choices, bool(found.problem)) == ((), True)
