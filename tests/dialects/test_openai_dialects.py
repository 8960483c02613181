"""OpenAI chat and completions: parsing, overrides, what is hidden, errors."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.openai_chat import OpenAIChat
from outrider.dialects.openai_completions import OpenAICompletions
from outrider.errors import RequestError
from outrider.registry import BUILTIN, resolve
from outrider.wire import Dialect, Event

CHAT, COMPLETIONS = OpenAIChat(), OpenAICompletions()


def chat_request(**fields):
    return CHAT.parse(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


@pytest.mark.parametrize("name", ["openai_chat", "openai_completions"])
def test_the_registry_knows_them(name):
    dialect: Dialect = resolve("dialect", name, field="dialects")()
    assert dialect.name == name in BUILTIN["dialect"]
    assert all(route.startswith("/v1/") for route in dialect.routes)


def test_parse_reads_model_stream_and_sampling_and_keeps_every_field_as_text():
    body = b'{"model": "m", "messages": [], "stream": true, "temperature": 0.50, "x": {"a":  1e2}, "stop": null}'
    request = CHAT.parse(body)
    assert (request.model, request.stream) == ("m", True)
    assert request.sampling == {"temperature": 0.5, "stop": None}
    assert bytes(request.fields["x"]) == b'{"a":  1e2}'
    assert request.body is body


def test_with_nothing_to_do_the_agents_bytes_go_upstream():
    request = chat_request(stream=True)
    prepared = CHAT.prepare(request, overrides={}, tokens=False)
    assert prepared.body is request.body
    assert prepared.hidden == frozenset()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
UNKNOWN = st.dictionaries(st.text(max_size=6).map("x_".__add__), JSON, max_size=4)


@given(UNKNOWN)
def test_R13_unknown_request_fields_reach_the_engine_unchanged(unknown):
    request = chat_request(**unknown)
    prepared = json.loads(CHAT.prepare(request, overrides={"temperature": 1.0}, tokens=True).body)
    added = {"temperature": 1.0, "return_token_ids": True, "logprobs": True}
    assert prepared == {"messages": [{"role": "user", "content": "x"}], **unknown, **added}


@given(UNKNOWN, UNKNOWN, UNKNOWN)
def test_R13_unknown_reply_fields_reach_the_agent_unchanged(top, in_choice, in_message):
    choice = {"index": 0, "message": {"content": "a", **in_message}, "finish_reason": "stop", **in_choice}
    shown = {"id": "c", **top, "choices": [{**choice, "logprobs": None}], "usage": {"prompt_tokens": 1}}
    logprobs = {"content": [{"token": "a", "logprob": -1.0}]}
    hidden = {"choices": [{**choice, "logprobs": logprobs, "token_ids": [5]}], "prompt_token_ids": [1]}
    prepared = CHAT.prepare(chat_request(), overrides={}, tokens=True)
    reader = CHAT.reader(prepared)
    assert json.loads(reader.body(json.dumps(shown | hidden).encode())) == shown
    assert reader.result().choices[0].token_ids == [5]


@pytest.mark.parametrize("tokens", [False, True])
def test_the_policys_name_goes_upstream_and_the_agents_own_comes_back(tokens):
    request = chat_request(model="gpt-5")
    prepared = CHAT.prepare(request, overrides={}, tokens=tokens, model="policy")
    assert json.loads(prepared.body)["model"] == "policy"
    assert "model" not in prepared.sampling
    reply = {"model": "policy", "choices": [{"index": 0, "message": {}, "finish_reason": "stop"}], "x": {"model": "y"}}
    assert json.loads(CHAT.reader(prepared).body(json.dumps(reply).encode())) == {**reply, "model": "gpt-5"}
    one = b'{"model":"policy","choices":[],"usage":null}'
    assert CHAT.reader(prepared).event(Event(b"data: %b\n\n" % one, one)) == b"data: %b\n\n" % one.replace(
        b"policy", b"gpt-5"
    )


def test_where_the_agent_uses_the_policys_name_its_bytes_go_as_they_are():
    request = chat_request(model="policy")
    assert CHAT.prepare(request, overrides={}, tokens=False, model="policy").body is request.body


def test_a_reply_without_anything_to_hide_is_the_same_object():
    reader = CHAT.reader(CHAT.prepare(chat_request(), overrides={}, tokens=True))
    body = b'{"choices": [{"index": 0, "message": {}, "logprobs": null, "finish_reason": "stop"}]}'
    assert reader.body(body) is body
    data = b'{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null}]}'
    event = Event(b"data: " + data + b"\n\n", data)
    assert reader.event(event) is event.raw


def test_a_comment_and_the_end_pass_as_they_are():
    reader = CHAT.reader(CHAT.prepare(chat_request(stream=True), overrides={}, tokens=True))
    assert reader.event(Event(b": ping\n\n", b"")) == b": ping\n\n"
    assert not reader.terminal
    assert reader.event(Event(b"data:[DONE]\r\n\r\n", b"[DONE]")) == b"data:[DONE]\r\n\r\n"
    assert reader.terminal
    assert not reader.finished


@pytest.mark.parametrize(("sent", "hidden"), [({}, True), ({"logprobs": False}, True), ({"logprobs": True}, False)])
def test_chat_log_probs_are_hidden_unless_asked_for(sent, hidden):
    prepared = CHAT.prepare(chat_request(**sent), overrides={}, tokens=True)
    assert ("logprobs" in prepared.hidden) is hidden
    assert json.loads(prepared.body)["logprobs"] is True


@pytest.mark.parametrize(
    ("sent", "asked"), [({}, 1), ({"logprobs": None}, 1), ({"logprobs": 0}, 0), ({"logprobs": 3}, 3)]
)
def test_completions_log_probs_are_asked_for_and_the_agents_number_stays(sent, asked):
    request = COMPLETIONS.parse(json.dumps({"prompt": "x", **sent}).encode())
    prepared = COMPLETIONS.prepare(request, overrides={}, tokens=True)
    assert json.loads(prepared.body)["logprobs"] == asked
    assert ("logprobs" in prepared.hidden) is (sent.get("logprobs") is None)


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1, 2], [3]], None])
def test_completions_take_every_form_of_prompt(prompt):
    assert COMPLETIONS.parse(json.dumps({"prompt": prompt}).encode()).stream is False


def test_completions_with_several_prompts_are_not_exact():
    reader = COMPLETIONS.reader(
        COMPLETIONS.prepare(COMPLETIONS.parse(b'{"prompt": ["a", "b"]}'), overrides={}, tokens=True)
    )
    choices = [{"index": i, "text": "x", "token_ids": [5], "prompt_token_ids": [i]} for i in range(2)]
    reader.body(json.dumps({"choices": choices}).encode())
    assert "different prompts" in reader.result().problem


@pytest.mark.parametrize("odd", ["-Infinity", "NaN", '"\\ud83d"'])
def test_a_reply_that_only_python_would_parse_is_an_answer_but_not_exact(odd):
    reader = CHAT.reader(CHAT.prepare(chat_request(), overrides={}, tokens=True))
    body = f'{{"choices": [{{"index": 0, "finish_reason": "stop", "x": {odd}}}]}}'.encode()
    assert reader.body(body) == body
    assert reader.finished
    assert "not valid JSON" in reader.result().problem


def test_a_number_too_large_for_a_float_does_not_hurt():
    assert CHAT.parse(b'{"messages": [], "x": 1e999, "y": 123456789012345678901234567890}').model == ""


def test_errors_have_the_protocols_shape():
    for status, kind in [(400, "invalid_request_error"), (401, "authentication_error"), (503, "server_error")]:
        error = json.loads(CHAT.error(status, "no", code="c", param="p"))["error"]
        assert error == {"message": "no", "type": kind, "param": "p", "code": "c"}
    event = CHAT.reader(CHAT.prepare(chat_request(), overrides={}, tokens=True)).fail(502, "gone")
    assert event.startswith(b"data: {")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:])["error"]["message"] == "gone"


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(body):
    for dialect in (CHAT, COMPLETIONS):
        with contextlib.suppress(RequestError):
            dialect.parse(body)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_reply_is_read_without_an_exception(data):
    for dialect, request in ((CHAT, chat_request()), (COMPLETIONS, COMPLETIONS.parse(b"{}"))):
        prepared = dialect.prepare(request, overrides={}, tokens=True)
        reader = dialect.reader(prepared)
        reader.event(Event(b"data: " + data + b"\n\n", data))
        reader.result()
        dialect.reader(prepared).body(data)


SHAPES = st.fixed_dictionaries(
    {},
    optional={
        "choices": JSON | st.lists(st.fixed_dictionaries({}, optional={
            "index": JSON, "token_ids": JSON, "logprobs": JSON, "finish_reason": JSON, "prompt_token_ids": JSON,
        }), max_size=3),
        "usage": JSON,
        "error": JSON,
        "prompt_token_ids": JSON,
        "object": JSON,
    },
)  # fmt: skip


@given(SHAPES)
def test_any_types_in_a_reply_are_read_without_an_exception(reply):
    data = json.dumps(reply).encode()
    prepared = CHAT.prepare(chat_request(stream=True), overrides={}, tokens=True)
    reader = CHAT.reader(prepared)
    reader.event(Event(b"data: " + data + b"\n\n", data))
    reader.body(data)
    reader.result()
