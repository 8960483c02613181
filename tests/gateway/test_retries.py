"""A call is sent again only while its agent has got nothing, and what was tried stands in its record."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.engine import Answer, ScriptedEngine, chunk, json_answer, sse, stream
from fakes.gateway import CHAT, MESSAGES, wait_for
from fakes.raw_upstream import Raw, RawUpstream, chunked_head, http, piece
from outrider.gateway.upstreams.retry import BASE_S, CAP_S, RetryPolicy, forbids_retry, retry_after
from outrider.types import CallState, Fidelity, Mode

BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
ASK = {"model": "m", "messages": MESSAGES}
RESET = Raw(end="reset")


@pytest.fixture
def gateway(start):
    with start(mode="train", upstream_retries=3) as gateway:
        yield gateway


def busy(status=503, head_gate=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = json_answer({"error": {"message": "busy"}}, status=status)
    return Answer(status=status, headers=answer.headers | named, chunks=answer.chunks, head_gate=head_gate)


# -- how long ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 20), st.floats(0, 60), st.none() | st.floats(0, 100), st.floats(0, 1))
def test_waits_stay_in_their_bounds(number, spent, asked, drawn):
    policy = RetryPolicy(retries=10, budget_s=30.0, draw=lambda low, high: low + drawn * (high - low))
    wait = policy.wait(number, spent, asked)
    if number >= 10:
        assert wait is None
    elif wait is None:
        assert spent + (asked or 0) + max(CAP_S, BASE_S) > 30
    else:
        assert spent + wait <= 30
        assert wait >= (asked or 0)
        assert wait <= (asked + BASE_S if asked is not None else min(CAP_S, BASE_S * 2**number))


def test_waits_grow_and_are_drawn():
    highest = RetryPolicy(retries=9, budget_s=1e9, draw=lambda low, high: high)
    assert [highest.wait(number, 0, None) for number in range(6)] == [0.5, 1, 2, 4, 8, 8]
    assert len({RetryPolicy(retries=9, budget_s=1e9).wait(3, 0, None) for _ in range(20)}) == 20


SENT = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        ([(b"retry-after", b"7")], 7),
        ([(b"retry-after", b" 0.5 ")], 0.5),
        ([(b"retry-after-ms", b"250"), (b"retry-after", b"7")], 0.25),
        ([(b"retry-after-ms", b"soon"), (b"retry-after", b"7")], 7),
        ([(b"retry-after", b"-1")], None),
        ([(b"retry-after", b"nan")], None),
        ([(b"retry-after", b"inf")], None),
        ([(b"retry-after", b"")], None),
        ([(b"retry-after", b"tomorrow")], None),
        ([(b"retry-after", b"Sun, 01 Mar 2026 12:00:09 GMT"), (b"date", b"Sun, 01 Mar 2026 12:00:00 GMT")], 9),
        ([(b"retry-after", b"Sun, 01 Mar 2026 11:00:00 GMT"), (b"date", b"Sun, 01 Mar 2026 12:00:00 GMT")], 0),
        ([(b"retry-after", b"Sun Mar  1 12:00:09 2026"), (b"date", b"Sun, 01 Mar 2026 12:00:00 GMT")], 9),
        ([(b"retry-after", b"\xff")], None),
    ],
)
def test_what_an_upstream_asks_for_is_read_in_every_form(headers, expected):
    assert retry_after(headers) == expected


def test_a_date_without_a_date_to_compare_is_taken_by_our_own_clock():
    until = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True).encode()
    assert 50 < retry_after([(b"retry-after", until)]) <= 60


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_no_header_makes_it_raise(value, date):
    found = retry_after([(b"retry-after", value), (b"date", date)])
    assert found is None or (found >= 0 and math.isfinite(found))


def test_an_upstream_may_forbid_it():
    assert forbids_retry([(b"x-should-retry", b"False")])
    assert not forbids_retry([(b"x-should-retry", b"true")])


# -- what is sent again ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("status", [429, 502, 503, 504, 529])
def test_a_busy_upstream_is_asked_again_and_the_call_recorded_once(engine, gateway, streamed, status):
    engine.answers.append(busy(status))
    got = gateway.chat(gateway.open(), stream=streamed)
    assert got.status == 200
    assert engine.received[0].body == engine.received[1].body
    call = gateway.call()
    assert (call.state, call.status, call.fidelity) == (CallState.COMPLETE, 200, Fidelity.EXACT)
    (retry,) = call.retries
    assert (retry.replica, retry.status, retry.error) == (engine.base_url, status, f"status {status}")
    assert 0 <= retry.wait_s <= call.duration_s
    assert call.replica == engine.base_url


def test_one_that_did_not_begin_in_time_is_not_asked_again_but_another_is(engine, start):
    limits = {"mode": "train", "upstream_retries": 2, "upstream_first_byte_timeout_s": 2.0}
    with start(**limits) as gateway:
        engine.answers.append(Answer(delay_s=60))
        got = gateway.chat(gateway.open())
        assert (got.status, got.json["error"]["code"]) == (504, "upstream_first_byte_timeout")
        assert len(engine.received) == 1
    with ScriptedEngine() as other, start(upstream=(engine.base_url, other.base_url), **limits) as gateway:
        engine.delay_s = 60
        for number in range(60):  # until one lives at the slow replica
            gateway.chat(gateway.open(f"two-{number}"))
            call = gateway.call(f"two-{number}")
            assert (call.state, call.replica) == (CallState.COMPLETE, other.base_url)
            if call.retries:
                break
        assert [retry.replica for retry in call.retries] == [engine.base_url]


@BOTH
@pytest.mark.parametrize("status", [400, 401, 404, 408, 500, 501])
def test_what_would_not_help_is_not_tried(engine, gateway, streamed, status):
    engine.answers.append(busy(status))
    assert gateway.chat(gateway.open(), stream=streamed).status == status
    assert len(engine.received) == 1
    assert gateway.call().retries == ()


def test_the_last_answer_passes_as_it_is(engine, gateway):
    engine.answers.extend(busy(retry_after="0", x_number=str(number)) for number in range(4))
    got = gateway.chat(gateway.open())
    assert (got.status, got.headers["x-number"], got.headers["retry-after"]) == (503, "3", "0")
    assert got.json == {"error": {"message": "busy"}}
    call = gateway.call()
    assert (call.state, call.status, len(call.retries)) == (CallState.FAILED, 503, 3)
    assert len(engine.received) == 4


def test_as_long_as_the_upstream_asks_and_no_sooner(engine, gateway):
    engine.answers.append(busy(429, retry_after="1"))
    assert gateway.chat(gateway.open()).status == 200
    assert gateway.call().retries[0].wait_s >= 1


@pytest.mark.parametrize("headers", [{"retry_after": "31"}, {"x_should_retry": "false"}])
def test_a_wait_over_the_limit_is_left_to_the_agent(engine, gateway, headers):
    engine.answers.append(busy(**headers))
    got = gateway.chat(gateway.open())
    assert got.status == 503
    assert got.headers.get("retry-after") == headers.get("retry_after")
    assert len(engine.received) == 1


def test_a_retry_after_of_one_replica_says_nothing_of_another(start):
    with (
        ScriptedEngine() as one,
        ScriptedEngine() as other,
        start(mode="train", upstream_retries=1, upstream=(one.base_url, other.base_url)) as gateway,
    ):
        one.answers.append(busy(retry_after="3000"))
        other.answers.append(busy(retry_after="3000"))
        got = gateway.chat(gateway.open())
        assert got.status == 503  # both asked, at once
        assert len(one.received) == len(other.received) == 1
        home, away = gateway.call().retries[0].replica, gateway.call().replica
        assert home != away
        assert gateway.chat(gateway.open("attempt-2")).status == 200
        gateway.chat(gateway.open())
        assert gateway.recorded(2)[-1].replica == home  # its prefix is still there


def test_the_whole_has_one_time_limit(engine, start):
    with start(mode="train", upstream_retries=50, upstream_timeout_s=1.0) as gateway:
        engine.answers.extend(Answer(delay_s=0.2, status=503) for _ in range(50))
        got = gateway.chat(gateway.open())
        assert got.status in (503, 504)
        assert 1 <= len(engine.received) < 30


# -- only while the agent has nothing ----------------------------------------------------------------------------------

CHUNK = sse(chunk({"content": "a"}))[0]
WHOLE = Raw(parts=[http(b'{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}')], end="keep")
UNSEEN = {
    "before a byte": RESET,
    "inside the head": Raw(parts=[b"HTTP/1.1 200 OK\r\ncontent-"], end="reset"),
    "after the head of a stream": Raw(parts=[chunked_head()], end="reset"),
    "a stream of nothing": Raw(parts=[chunked_head() + piece(b"")], end="keep"),
    "inside a plain body": Raw(parts=[http(b'{"choices": [{"ind', length=500)], end="close"),
    "a stream that is no chunked one": Raw(parts=[chunked_head()], end="close"),
}


@pytest.mark.parametrize("broken", UNSEEN.values(), ids=UNSEEN.keys())
def test_what_broke_off_unseen_is_asked_for_again(start, broken):
    with RawUpstream(broken, WHOLE) as upstream, start(upstream=upstream.base_url, upstream_retries=2) as gateway:
        got = gateway.chat(gateway.open(mode=Mode.RECORD), stream=True)
        assert (got.status, got.body) == (200, WHOLE.parts[0].partition(b"\r\n\r\n")[2])
        call = gateway.call()
        assert (call.state, call.response) == (CallState.COMPLETE, got.body)
        assert [retry.status for retry in call.retries] == [0]
        assert upstream.requests == 2


def test_after_the_first_event_nothing_is_tried_again(start):
    broken = Raw(parts=[chunked_head() + piece(CHUNK)], end="reset")
    with RawUpstream(broken, WHOLE) as upstream, start(upstream=upstream.base_url, upstream_retries=2) as gateway:
        got = gateway.chat(gateway.open(mode=Mode.RECORD), stream=True)
        assert got.events[0]["choices"][0]["delta"] == {"content": "a"}
        assert got.events[-1]["error"]["code"] == "upstream_cut"
        call = gateway.call()
        assert (call.state, call.retries) == (CallState.FAILED, ())
        assert upstream.requests == 1


def test_an_answer_that_makes_no_sense_is_not_asked_for_again(start):
    page = Raw(parts=[http(b"<html>", kind="text/html")], end="keep")
    with RawUpstream(page, WHOLE) as upstream, start(upstream=upstream.base_url, upstream_retries=2) as gateway:
        assert gateway.chat(gateway.open()).json["error"]["code"] == "upstream_invalid"
        assert upstream.requests == 1


def test_what_passes_through_is_not_sent_twice(start):
    with (
        RawUpstream(RESET, WHOLE) as upstream,
        start(upstream=upstream.base_url, mode="passthrough", upstream_retries=2) as gateway,
    ):
        got = gateway.post("/v1/files", b"a file")
        assert (got.status, got.json["error"]["code"]) == (502, "upstream_cut")
        assert upstream.requests == 1


def test_in_passthrough_the_providers_answer_is_the_agents(engine, start):
    with start(mode="passthrough", upstream_retries=2) as gateway:
        engine.answers.append(busy(429, retry_after="0"))
        assert gateway.post(CHAT, ASK).status == 429
        assert len(engine.received) == 1


# -- meanwhile ---------------------------------------------------------------------------------------------------------


@BOTH
def test_a_client_that_leaves_between_two_sendings_is_not_sent_again(engine, gateway, streamed):
    engine.answers.append(busy(retry_after="20"))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", ASK | {"stream": streamed})
    wait_for(lambda: engine.served == 1)
    time.sleep(0.1)
    raw.close()
    call = gateway.call()
    assert (call.state, call.status) == (CallState.CANCELLED, 499)
    assert call.fidelity is not Fidelity.EXACT
    assert len(engine.received) == 1
    wait_for(lambda: gateway.client.health()["in_flight"] == 0)


def test_new_weights_need_not_wait_for_a_retry_and_are_the_ones_that_answer(engine, gateway):
    gateway.client.resume(3)
    gate = threading.Event()
    engine.answers.append(busy(retry_after="1", head_gate=gate))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", ASK)
    wait_for(lambda: engine.received)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(gateway.client.pause, 60)
        wait_for(lambda: gateway.client.health()["paused"])
        assert not pausing.done()
        gate.set()
        assert pausing.result(60) == 0
    gateway.client.resume(4)
    assert raw.recv(65536).startswith(b"HTTP/1.1 200")
    raw.close()
    call = gateway.call()
    assert (call.version_start, call.version_end, call.fidelity) == (4, 4, Fidelity.EXACT)
    assert len(call.retries) == 1


def test_a_pause_that_lasts_leaves_the_agent_with_what_there_was(engine, start):
    with start(mode="train", upstream_retries=2, pause_wait_s=0.2) as gateway:
        gate = threading.Event()
        engine.answers.append(busy(retry_after="1", head_gate=gate))
        raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", ASK)
        wait_for(lambda: engine.received)
        gateway.client.pause(0)
        gate.set()
        assert raw.recv(65536).startswith(b"HTTP/1.1 503")
        raw.close()
        gateway.client.resume(1)
        assert (gateway.call().state, len(engine.received)) == (CallState.FAILED, 1)
        assert gateway.chat(gateway.open("attempt-2")).status == 200
        assert gateway.client.health()["in_flight"] == 0


# -- clients -----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_sdks_see_an_answer_and_no_error(engine, gateway, streamed):
    url = f"{gateway.base_url}/s/{gateway.open()}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as gpt:
        engine.answers.extend([busy(retry_after="0"), busy(429, retry_after="0")])
        answer = gpt.chat.completions.create(**ASK, stream=streamed)
        assert len(list(answer)) > 1
        engine.answers.append(busy(retry_after="0"))
        answer = gpt.responses.create(model="m", input="Hi", stream=streamed)
        assert list(answer)
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as claude:
        engine.answers.append(busy(529, retry_after="0"))
        answer = claude.messages.create(**ASK, max_tokens=9, stream=streamed)
        assert list(answer)
        engine.answers.append(busy(retry_after="0"))
        assert claude.messages.count_tokens(**ASK).input_tokens == 3
    calls = gateway.recorded(3)
    assert [len(call.retries) for call in calls] == [2, 1, 1]
    assert {call.fidelity for call in calls} == {Fidelity.EXACT}


def test_a_stream_that_was_sent_again_is_passed_on_from_its_first_byte(engine, gateway):
    answer = stream(chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="stop"))
    engine.answers.extend([busy(retry_after="0"), answer])
    key = gateway.open(mode=Mode.RECORD)
    assert gateway.chat(key, stream=True).body == b"".join(answer.chunks)
    assert gateway.call().response == b"".join(answer.chunks)
