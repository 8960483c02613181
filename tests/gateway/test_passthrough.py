"""In passthrough an agent can't tell the gateway from the provider."""

from __future__ import annotations

import http.client
import threading

import pytest

from fakes.engine import Answer, chunk, gzipped, json_answer, raw_stream, sse, stream
from fakes.gateway import CHAT, MESSAGES, wait_for
from outrider.types import Mode


@pytest.fixture
def gateway(engine, start):
    with start(mode="passthrough") as gateway:
        yield gateway


def test_bytes_status_and_headers_pass_both_ways(engine, gateway):
    headers = {
        "content-type": "application/json; odd",
        "openai-processing-ms": "12",
        "x-request-id": "req_1",
        "set-cookie": "a=b",
        "date": "Mon, 01 Jan 2024 00:00:00 GMT",
        "server": "cloudflare",
    }
    engine.answers.append(Answer(status=201, headers=headers, chunks=[b'{"a":', b"  1}\n"]))
    body = b'{"model":  "gpt", "messages": "whatever the provider thinks of it"}'
    got = gateway.post(f"{CHAT}?a=%20b", body, {"authorization": "Bearer sk-x", "openai-beta": "y"})
    assert (got.status, got.body) == (201, b'{"a":  1}\n')
    assert {name: got.headers[name] for name in headers} == headers
    asked = engine.received[0]
    assert asked.body == body
    assert asked.query == "a=%20b"
    assert asked.headers["authorization"] == "Bearer sk-x"
    assert asked.headers["openai-beta"] == "y"
    assert asked.headers["host"] == f"127.0.0.1:{engine.port}"
    assert gateway.store.calls_after(0) == []


def test_headers_of_one_connection_are_not_passed_on(engine, gateway):
    headers = {"connection": "keep-alive, x-hop", "x-hop": "1", "te": "trailers", "keep-alive": "9", "x-end": "2"}
    gateway.post(CHAT, {}, headers)
    asked = engine.received[0].headers
    assert asked["x-end"] == "2"
    assert not {"x-hop", "te", "keep-alive"} & asked.keys()


def test_a_content_length_stays_and_a_chunked_body_stays_chunked(engine, gateway):
    engine.answers.append(Answer(headers={"content-length": "3"}, chunks=[b"abc"]))
    assert gateway.post(CHAT, {}).headers["content-length"] == "3"
    engine.answers.append(Answer(chunks=[b"abc", b"def"]))
    got = gateway.post(CHAT, {})
    assert got.body == b"abcdef"
    assert got.headers["transfer-encoding"] == "chunked"


def test_other_routes_and_methods_of_a_provider_pass_too(engine, gateway):
    assert gateway.request("GET", "/v1/models").json["data"][0]["id"] == "policy"
    engine.answers.append(json_answer({"data": []}))
    assert gateway.post("/v1/embeddings", {"input": "x"}).json == {"data": []}
    assert gateway.request("GET", "/v1/nothing").json == {"detail": "Not Found"}
    engine.answers.append(Answer(status=204, headers={}))
    assert gateway.request("DELETE", "/v1/files/1").status == 204
    assert [r.method for r in engine.received] == ["GET", "POST", "GET", "DELETE"]


def test_HEAD_has_no_body_and_does_not_hang(engine, gateway):
    engine.answers.append(Answer(headers={"content-length": "5"}))
    got = gateway.request("HEAD", "/v1/x")
    assert (got.status, got.body) == (200, b"")
    assert gateway.request("GET", "/v1/models").status == 200


@pytest.mark.parametrize("mode", ["passthrough", "train"])
def test_S12_the_first_event_arrives_before_the_second_is_made(engine, start, mode):
    with start(mode="passthrough") as gateway:
        key = gateway.open(mode=Mode(mode))
        gate = threading.Event()
        chunks = [chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="stop")]
        engine.answers.append(stream(*chunks, done=False, gate=gate))
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        body = b'{"messages": [], "stream": true}'
        connection.request("POST", f"/s/{key}{CHAT}", body, {"accept-encoding": "gzip"})
        answer = connection.getresponse()
        assert b'"a"' in answer.readline()  # the engine waits for us before it makes the second
        gate.set()
        assert b'"b"' in answer.read()
        assert answer.getheader("content-encoding") is None
        connection.close()


def test_S12_a_gzipped_answer_passes_as_it_is(engine, gateway):
    plain = json_answer({"a": "b" * 1000})
    packed = gzipped(plain)
    engine.answers.append(packed)
    got = gateway.post(CHAT, {}, {"accept-encoding": "gzip"})
    assert got.headers["content-encoding"] == "gzip"
    assert got.body == b"".join(packed.chunks)
    assert engine.received[0].headers["accept-encoding"] == "gzip"


@pytest.mark.parametrize("streamed", [False, True])
def test_S12_a_gzipped_answer_nobody_asked_for_is_recorded_and_sent_plain(engine, gateway, streamed):
    key = gateway.open(mode=Mode.RECORD)
    parts = [chunk({"content": "a" * 500}), chunk({"content": "b"}, finish_reason="stop")]
    whole = json_answer({"choices": [{"index": 0, "message": {}, "finish_reason": "stop"}], "pad": "x" * 500})
    answer = stream(*parts) if streamed else whole
    engine.answers.append(gzipped(answer))
    got = gateway.post(f"/s/{key}{CHAT}", {"messages": [], "stream": streamed}, {"accept-encoding": "gzip"})
    assert engine.received[0].headers["accept-encoding"] == "identity"
    assert "content-encoding" not in got.headers
    assert got.body == b"".join(answer.chunks)
    assert gateway.call().response == got.body


def test_S12_an_encoding_we_cannot_undo_is_an_error_not_garbage(engine, gateway):
    key = gateway.open(mode=Mode.RECORD)
    engine.answers.append(Answer(headers={"content-encoding": "br"}, chunks=[b"xxxx"]))
    got = gateway.chat(key)
    assert got.status == 502
    assert "'br'" in got.json["error"]["message"]
    assert gateway.call().state == "failed"


def test_odd_stream_bytes_pass_unchanged(engine, gateway):
    body = b": hi\r\n\r\ndata: \xf0\x9f\x98\x80\r\rdata: {broken\n\n" + sse({"x": 1})[0] + b"data: no end"
    engine.answers.append(raw_stream(body[:13], body[13:30], body[30:], chunk_delay_s=0.02))
    got = gateway.post(CHAT, {"stream": True, "messages": MESSAGES})
    assert got.body == body
    assert got.clean


def test_a_cut_answer_ends_abruptly_for_the_agent_too(engine, gateway):
    engine.answers.append(Answer(headers={"content-length": "10"}, chunks=[b"abc"], end="reset"))
    got = gateway.post(CHAT, {})
    assert not got.clean
    assert got.body == b"abc"


def test_a_client_that_leaves_ends_the_call_upstream(engine, gateway):
    engine.answers.append(Answer(delay_s=60))
    raw = gateway.open_socket(CHAT, {})
    wait_for(lambda: engine.received)
    raw.close()
    wait_for(lambda: engine.aborted == 1)
    assert gateway.client.pause(10) == 0


def test_an_upstream_that_is_not_there_is_502_in_the_protocols_shape(engine, start):
    with start(upstream="http://127.0.0.1:1", mode="passthrough") as gateway:
        got = gateway.post(CHAT, {})
        assert got.status == 502
        assert "cannot connect" in got.json["error"]["message"]


@pytest.mark.parametrize("suffix", ["/v1", "/v1/", "/"])
def test_a_base_url_may_end_in_v1(engine, start, suffix):
    with start(upstream=engine.base_url + suffix) as gateway:
        assert gateway.request("GET", "/v1/models").status == 200
        assert engine.received[0].path == "/v1/models"
