"""Answers that are right but unusual are taken; what is no answer says what it is."""

from __future__ import annotations

import gzip

import pytest

from fakes.engine import Answer, chunk, json_answer, stream
from fakes.gateway import CHAT, MESSAGES
from outrider.types import CallState

WHOLE = {
    "id": "c",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
}
PATHS = {
    CHAT: {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["Text/Event-Stream", "TEXT/EVENT-STREAM; charset=utf-8"])
def test_a_media_type_has_no_case(engine, gateway, path, kind):
    told = stream(chunk({"content": "x"}, finish_reason="stop"))
    engine.answers.append(Answer(headers={"content-type": kind}, chunks=told.chunks))
    got = gateway.post(f"/s/{gateway.open()}{path}", {"model": "m", "stream": True, **PATHS[path]})
    assert got.status == 200
    assert got.events
    assert gateway.call().state is CallState.COMPLETE


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_no_encoding_may_be_named(engine, gateway, encoding):
    plain = json_answer(WHOLE)
    engine.answers.append(Answer(headers={**plain.headers, "content-encoding": encoding}, chunks=plain.chunks))
    key = gateway.open()
    assert gateway.chat(key).status == 200
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    assert gateway.post(f"/s/{key}{CHAT}", body, {"content-encoding": encoding}).status == 200
    assert gateway.post(f"/s/{key}{CHAT}", gzip.compress(body), {"content-encoding": "GZIP"}).status == 200


def test_another_protocol_is_no_answer(engine, gateway):
    headers = {"connection": "upgrade", "upgrade": "x"}
    engine.answers.append(Answer(status=101, headers=headers, chunks=[b"\x00"], end="reset"))
    got = gateway.chat(gateway.open())
    assert got.status == 502
    assert "another protocol" in got.json["error"]["message"]
