"""S11: a client that leaves takes its call with it, whatever protocol it speaks and however far the answer was."""

from __future__ import annotations

import asyncio
import time

import anthropic
import openai
import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from fakes.engine import Answer, chunk, json_answer, raw_stream, sse
from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, wait_for
from outrider.types import CallState, Fidelity

ASKS = {
    CHAT: {"model": "m", "messages": MESSAGES},
    COMPLETIONS: {"model": "m", "prompt": "Hi"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": MESSAGES},
    "/v1/responses": {"model": "m", "input": "Hi"},
}
WAYS = pytest.mark.parametrize("path", ASKS)
NATIVE = ("openai_chat", "openai_completions", "anthropic_messages", "openai_responses")
BOTH = pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
BEGUN = {
    False: Answer(headers={"content-type": "application/json", "content-length": "999"}, chunks=[b'{"a'], end="hang"),
    True: raw_stream(*sse(chunk({"content": "a"}), done=False), end="hang"),
}


def leave(gateway, engine, path, streamed, answer):
    """Begin a call, close the connection once the engine has it, and wait until the engine has noticed.

    By themselves its answers would take longer than that is waited for, or for ever.
    """
    before, aborted = len(engine.received), engine.aborted
    engine.answers.append(answer)
    raw = gateway.open_socket(path, ASKS[path[path.index("/v1") :]] | {"stream": streamed})
    wait_for(lambda: len(engine.received) > before)
    time.sleep(0.05)  # what has begun is on its way
    raw.close()
    wait_for(lambda: engine.aborted > aborted)


@WAYS
@BOTH
@pytest.mark.parametrize("native", [False, True], ids=["translated", "native"])
def test_S11_the_upstream_is_let_go_and_the_call_recorded_as_cancelled(engine, start, path, streamed, native):
    options = {"upstream_dialects": NATIVE} if native else {}
    with start(mode="train", max_in_flight=1, **options) as gateway:
        for name, answer in (("before the first byte", Answer(delay_s=60)), ("inside", BEGUN[streamed])):
            leave(gateway, engine, f"/s/{gateway.open(name)}{path}", streamed, answer)
            call = gateway.call(name)
            assert call.state is CallState.CANCELLED
            assert call.fidelity is not Fidelity.EXACT
            assert call.error == "the client left"
        wait_for(lambda: gateway.client.health()["in_flight"] == 0)
        assert gateway.client.pause(5) == 0
        gateway.client.resume(1)
        engine.answers.append(json_answer({"error": "x"}, status=400))
        got = gateway.post(f"/s/{gateway.open('next')}{path}", ASKS[path])
        assert got.status == 400  # and not 503: there is room for one


@BOTH
def test_S11_in_passthrough_too(engine, start, streamed):
    with start(mode="passthrough", max_in_flight=1) as gateway:
        for answer in (Answer(delay_s=60), BEGUN[streamed]):
            leave(gateway, engine, CHAT, streamed, answer)
        wait_for(lambda: gateway.client.health()["in_flight"] == 0)
        assert gateway.post(CHAT, ASKS[CHAT]).status == 200
        assert gateway.store.calls_after(0) == []


@BOTH
def test_S11_behind_a_middleware_that_reads_the_connection_itself(engine, host, start, streamed):
    async def dispatch(request, call_next):
        return await call_next(request)

    with start(mode="train") as gateway:
        app = host.app
        host.app = BaseHTTPMiddleware(app, dispatch=dispatch)
        try:
            leave(gateway, engine, f"/s/{gateway.open()}{CHAT}", streamed, Answer(delay_s=60))
            assert gateway.call().state is CallState.CANCELLED
        finally:
            host.app = app


@WAYS
@BOTH
def test_S11_a_client_that_closes_right_after_the_end_has_a_whole_call(engine, gateway, path, streamed):
    raw = gateway.open_socket(f"/s/{gateway.open()}{path}", ASKS[path] | {"stream": streamed})
    received = b""
    marks = (b"[DONE]", b"message_stop", b"event: response.completed") if streamed else (b'"usage"',)
    while not any(mark in received for mark in marks):
        received += raw.recv(65536)
    raw.close()
    call = gateway.call()
    assert (call.state, call.fidelity) == (CallState.COMPLETE, Fidelity.EXACT)
    assert engine.aborted == 0


@BOTH
async def test_S11_sdk_clients_that_are_cancelled(engine, gateway, streamed):
    url = f"{gateway.base_url}/s/{gateway.open()}"
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as gpt,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as claude,
    ):
        asks = (
            lambda: gpt.chat.completions.create(**ASKS[CHAT], stream=streamed),
            lambda: gpt.responses.create(**ASKS["/v1/responses"], stream=streamed),
            lambda: claude.messages.create(**ASKS["/v1/messages"], stream=streamed),
        )
        for number, ask in enumerate(asks, start=1):
            engine.answers.append(Answer(delay_s=60))
            calling = asyncio.ensure_future(ask())
            await asyncio.to_thread(wait_for, lambda number=number: len(engine.received) == number)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            await asyncio.to_thread(wait_for, lambda number=number: engine.aborted == number)
    calls = await asyncio.to_thread(gateway.recorded, 3)
    assert {call.state for call in calls} == {CallState.CANCELLED}


def test_S11_a_sdk_that_stops_reading_a_stream_cancels_it(engine, gateway):
    engine.answers.append(BEGUN[True])
    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{gateway.open()}/v1", api_key="k", max_retries=0) as client:
        events = client.chat.completions.create(**ASKS[CHAT], stream=True)
        assert next(events).choices[0].delta.content == "a"
        events.close()
        wait_for(lambda: engine.aborted == 1)
    assert gateway.call().state is CallState.CANCELLED
