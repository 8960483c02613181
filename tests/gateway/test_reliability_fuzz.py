"""Requests and answers that are broken at random: never a 500, never a clean answer that is wrong.

`bench/reliability.py --only fuzz` does the same for an hour, over raw sockets and with broken HTTP.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.engine import Answer, Reply, Sampled, json_answer
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES
from fakes.mutate import ODD_VALUES, broken_json, broken_stream
from outrider import trajectory
from outrider.errors import RequestError
from outrider.gateway.capture import capture
from outrider.gateway.options import load_dialects
from outrider.gateway.sse import EventSplitter
from outrider.registry import BUILTIN
from outrider.types import CallState, Fidelity, Mode

DATA = Path(__file__).parents[1] / "dialects" / "data"
RECORDED = [json.loads(line) for file in sorted(DATA.glob("*.jsonl")) for line in file.read_text().splitlines()]
RECORDED.append({"path": COMPLETIONS, "body": {"model": "policy", "prompt": "Hi", "max_tokens": 5}})
RECORDED = [record for record in RECORDED if isinstance(record["body"], dict)]
DIALECTS = {route: dialect for dialect in load_dialects(tuple(BUILTIN["dialect"]), ()) for route in dialect.routes} | {
    route: dialect for dialect in load_dialects(("openai_chat", "openai_completions"), ()) for route in dialect.routes
}
ROUTES = sorted(DIALECTS)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32)

SIMPLE = {
    CHAT: {"model": "policy", "messages": MESSAGES},
    COMPLETIONS: {"model": "policy", "prompt": "Hi"},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": MESSAGES},
    "/v1/responses": {"model": "policy", "input": "Hi"},
}
CALLING = Sampled(tool_calls=[{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}])


@pytest.fixture
def gateway(start):
    """With an upstream that is never given up, however often it breaks off."""
    with start(mode="train", health_fall=10**6, upstream_retries=0) as gateway:
        yield gateway


def upstream_reply(chat, calling=False, streamed=False):
    asked = {"return_token_ids": True, "logprobs": True if chat else 1, "model": "policy"}
    asked |= {"stream_options": {"include_usage": True}} if streamed else {}
    sampled = [CALLING if calling else Sampled()]
    return Reply(asked=asked, chat=chat, sampled=sampled, prompt_ids=[1, 2, 3], id="x")


def is_shaped(path, body):
    """An error body of the protocol."""
    found = json.loads(body)
    if path.startswith("/v1/messages"):
        return found["type"] == "error" and isinstance(found["error"]["message"], str)
    return isinstance(found["error"]["message"], str)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [True, False])
@FUZZ
@given(SEEDS)
def test_a_dialect_takes_a_broken_request_or_says_what_is_wrong(tokens, seed):
    chance = random.Random(seed)
    record = chance.choice(RECORDED)
    dialect = DIALECTS.get(record["path"])
    if dialect is None:
        return
    body = broken_json(record["body"], chance)
    try:
        prepared = dialect.prepare(dialect.parse(body), overrides={"temperature": 1.0}, tokens=tokens, owner="me")
        told = None
    except RequestError as error:
        told = error
    if told is None:
        assert isinstance(json.loads(prepared.body), dict)
        return
    assert 400 <= told.status < 500
    assert is_shaped(record["path"], dialect.error(told.status, str(told), code=told.code, param=told.param))


WRONG = {
    "nothing": b"",
    "no JSON": b"hello",
    "half of it": b'{"model": "policy", "messages": [',
    "a list": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "bad UTF-8": b'{"model": "p\xff", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "prompt": ""}',
    "surrogates as bytes": b'{"model": "\xed\xa0\x80", "messages": [], "input": "Hi", "prompt": "Hi"}',
    "a BOM": b'\xef\xbb\xbf{"model": "policy"}',
    "NaN": b'{"model": "policy", "temperature": NaN, "messages": [], "input": "Hi", "prompt": "Hi", "max_tokens": 1}',
    "Infinity": b'{"model": "policy", "temperature": Infinity, "messages": [], "input": "Hi", "prompt": "Hi"}',
    "deep lists": b'{"model": "policy", "messages": ' + b"[" * 200_000,
    "deep objects": b'{"model": "policy", "messages": ' + b'{"a":' * 200_000,
    "whole deep lists": b'{"model": "p", "max_tokens": 1, "input": "x", "prompt": "x", "messages": [], "x": '
    + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a control character": b'{"model": "a\nb"}',
    "a wrong escape": b'{"model": "\\x41"}',
    "half an escape": b'{"model": "\\u12"}',
    "rest after the end": b'{"model": "policy", "messages": []} {}',
    "single quotes": b"{'model': 'policy'}",
    "zeros": b"\0" * 100,
    "wrong types": b'{"model": 5, "messages": "x", "input": 5, "prompt": {}, "max_tokens": "x"}',
}  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_what_no_protocol_allows_is_refused_in_the_protocols_own_shape(engine, gateway, path, body):
    got = gateway.post(f"/s/{gateway.open()}{path}", body)
    assert 400 <= got.status < 500, got.body
    assert is_shaped(path, got.body)
    assert engine.received == []
    assert gateway.store.calls("attempt-1") == []


DUBIOUS = {
    "huge numbers": '"seed": 1%s' % ("0" * 400),
    "a huge exponent": '"temperature": 1e400',
    "a small exponent": '"temperature": 1e-400',
    "lone surrogates": '"user": "\\ud800"',
    "a name twice": '"stream": true, "stream": false',
    "a name twice, of two types": '"n": 1, "n": "x"',
    "an escaped name": '"str\\u0065am": true',
    "NUL": '"user": "\\u0000"',
    "deep": f'"x": {"[" * 300}{"]" * 300}',
    "an unknown field": '"x_future": {"a": [1, 2, {"b": null}]}',
}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("field", DUBIOUS.values(), ids=DUBIOUS.keys())
def test_what_parsers_differ_on_is_refused_or_read_by_both_alike(engine, gateway, path, field):
    """What is recorded, sampled and streamed must be what the engine saw."""
    text = json.dumps(SIMPLE[path])
    got = gateway.post(f"/s/{gateway.open()}{path}", f"{text[:-1]}, {field}}}".encode())
    if 400 <= got.status < 500:
        assert is_shaped(path, got.body)
        assert engine.received == []
        return
    assert got.status == 200, got.body
    asked = engine.received[0].json
    streamed = got.headers["content-type"].startswith("text/event-stream")
    assert bool(asked.get("stream")) is streamed
    call = gateway.call()
    assert call.streamed is streamed
    assert call.state is CallState.COMPLETE
    for name, value in call.sampling.items():
        assert asked[name] == value
    assert list(dict.fromkeys(engine.received[0].body.decode().split('"stream"')))[2:] == [], "sent twice"


@FUZZ
@given(SEEDS)
def test_a_broken_request_is_never_a_500(engine, gateway, caplog, seed):
    chance = random.Random(seed)
    record = chance.choice(RECORDED)
    body = broken_json(record["body"], chance)
    engine.answers.clear()
    engine.received.clear()
    engine.answers.append(json_answer(upstream_reply(chat=record["path"] != COMPLETIONS).body()))
    got = gateway.post(f"/s/{gateway.open(f'attempt-{seed}')}{record['path']}", body)
    assert got.status < 500 or engine.received, got.body
    assert b'"gateway"' not in got.body
    assert not caplog.records
    if got.status != 200:
        assert is_shaped(record["path"], got.body)
    calls = gateway.store.calls(f"attempt-{seed}")
    assert len(calls) <= len(engine.received)
    for call in calls:
        assert (call.state is CallState.COMPLETE) is (got.status == 200), (call.error, got.body)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@FUZZ
@given(SEEDS)
def test_a_reader_takes_in_whatever_comes(path, streamed, seed):
    chance = random.Random(seed)
    dialect = DIALECTS[path]
    body = json.dumps(SIMPLE[path] | {"stream": streamed}).encode()
    reader = dialect.reader(dialect.prepare(dialect.parse(body), overrides={}, tokens=True, owner="me"))
    reply = upstream_reply(chat=path != COMPLETIONS, calling=chance.random() < 0.3, streamed=streamed)
    if streamed:
        splitter = EventSplitter()
        for piece in broken_stream(reply.chunks(), chance):
            for event in splitter.feed(piece):
                assert isinstance(reader.event(event), bytes)
        for event in splitter.end():
            reader.event(event)
        assert isinstance(reader.end(), bytes)
        assert isinstance(reader.fail(502, "x"), bytes)
    else:
        assert isinstance(reader.body(broken_json(reply.body(), chance)), bytes)
    captured = capture(reader.result())
    if captured.fidelity is Fidelity.EXACT:
        for choice in captured.choices:
            assert len(choice.token_ids) == len(choice.logprobs) > 0
            assert choice.finish_reason


def ends_cleanly(path, got, streamed):
    """The agent takes it for a whole answer: what it makes of the bytes, in Python."""
    if got.status != 200 or not got.clean:
        return False
    if not got.headers.get("content-type", "").startswith("text/event-stream"):
        found = json.loads(got.body)
        return not found.get("error") and found.get("status") != "failed" and found.get("type") != "error"
    events = [event for event in EventSplitter().feed(got.body) if event.data]
    if any(told_an_error(event.data) for event in events):
        return False
    last = {"/v1/messages": (b"message_stop",), "/v1/responses": (b"response.completed", b"response.incomplete")}
    # Without an error a client of the other two takes the stream for whole, be there a [DONE] or not.
    return bool(events) and (path not in last or events[-1].name in last[path])


def told_an_error(data):
    return data != b"[DONE]" and bool(json.loads(data).get("error"))


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.RECORD])
@pytest.mark.parametrize("streamed", [False, True])
@FUZZ
@given(SEEDS)
def test_a_broken_answer_is_clean_for_the_agent_only_where_it_is_complete_in_the_store(
    engine, gateway, caplog, mode, streamed, seed
):
    chance = random.Random(seed)
    path = chance.choice(ROUTES)
    reply = upstream_reply(chat=path != COMPLETIONS, calling=chance.random() < 0.3, streamed=streamed)
    engine.answers.clear()
    kind = {"content-type": "text/event-stream" if streamed else "application/json"}
    pieces = broken_stream(reply.chunks(), chance) if streamed else [broken_json(reply.body(), chance)]
    end = "reset" if chance.random() < 0.1 else "clean"
    engine.answers.append(Answer(headers=kind, chunks=pieces, end=end))
    attempt_id = f"attempt-{seed}-{mode}"
    before = len(gateway.store.calls(attempt_id))
    key = gateway.open(attempt_id, mode=mode)
    got = gateway.post(f"/s/{key}{path}", SIMPLE[path] | {"stream": streamed})
    calls = gateway.recorded(before + 1, attempt_id)
    call = calls[-1]
    assert not caplog.records
    assert got.status in (200, 502), got.body
    clean = ends_cleanly(path, got, streamed)
    assert clean is (call.state is CallState.COMPLETE), (clean, call.state, call.error, got.body)
    if call.fidelity is Fidelity.EXACT:
        assert call.state is CallState.COMPLETE
    trajectory.build(calls)  # takes it or counts it; never raises


@FUZZ
@given(SEEDS)
def test_an_error_status_with_a_broken_body_reaches_the_agent_as_an_error(engine, gateway, caplog, seed):
    chance = random.Random(seed)
    path = chance.choice(ROUTES)
    status = chance.choice((400, 401, 404, 408, 413, 422, 429, 500, 502, 503, 529, 599))
    body = broken_json({"error": {"message": "no", "type": "x", "code": chance.choice(ODD_VALUES)}}, chance)
    engine.answers.clear()
    engine.answers.append(Answer(status=status, chunks=[body]))
    attempt_id = f"attempt-{seed}-error"
    got = gateway.post(f"/s/{gateway.open(attempt_id)}{path}", SIMPLE[path])
    assert got.status >= 400
    assert not caplog.records
    assert all(call.state is CallState.FAILED for call in gateway.store.calls(attempt_id))
