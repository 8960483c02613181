"""What an agent may try with its key, and what it gets: its own model routes and nothing else."""

from __future__ import annotations

import json
import socket

import pytest

from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES
from outrider.keys import hash_key
from outrider.types import Attempt, Reward, Rollout, RolloutState, Task

BODY = {"model": "policy", "messages": MESSAGES}


@pytest.fixture
def gateway(start):
    with start(mode="train") as gateway:
        gateway.store.put_attempt(Attempt(id="attempt-1", rollout_id="r", number=1))
        gateway.store.add_reward(Reward(attempt_id="attempt-1", value=0.25)).result(30)
        task = Task(id="t", fields={})
        gateway.store.add_rollouts([Rollout(id="r", task=task, group_id="g", state=RolloutState.RUNNING, attempt=1)])
        yield gateway


def state_of(gateway):
    """Everything that an agent must not change."""
    return (
        [(reward.name, reward.value) for reward in gateway.store.rewards("attempt-1")],
        [(reward.name, reward.value) for reward in gateway.store.rewards("attempt-2")],
        gateway.store.rollout("r"),
        gateway.store.attempt("attempt-1"),
        gateway.store.calls_after(0),
        gateway.client.health(),
    )


def carriers(key, path):
    """A path with the key in each place that a key can be in."""
    yield f"/s/{key}{path}", {}
    yield path, {"authorization": f"Bearer {key}"}
    yield path, {"x-api-key": key}
    yield f"/s/{key}{path}", {"authorization": f"Bearer {key}"}


# Scores, ends, reads and engines: whatever such a route might be called.
PATHS = [
    "/feedback", "/v1/feedback", "/rewards", "/v1/rewards", "/reward",
    "/admin/attempts/attempt-1/rewards", "/admin/attempts/attempt-2/rewards", "/admin/attempts/attempt-1/seal",
    "/admin/attempts/attempt-1/calls", "/admin/attempts/attempt-1", "/admin/rollouts/r", "/rollouts/r", "/end", "/seal",
    "/admin/attempts", "/admin/pause", "/admin/resume", "/admin/stats", "/admin", "/admin/", "/admin/engines",
    "/admin/upstreams", "/engines", "/v1/engines", "/register", "/v1/calls", "/calls", "/sessions", "/admin/sessions",
    "/metrics", "/ready/x", "/health/x",
    "/control/load_weights", "/v1/control/load_weights", "/v1/load_lora_adapter", "/load_lora_adapter",
    "/v1/files", "/v1/fine_tuning/jobs", "/v1/chat/completions/x", "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel", "/v1/messages/batches", "/v1/embeddings", "/tokenize",
    "/v1/tokenize", "/collective_rpc", "/sleep",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_an_agents_key_opens_no_other_route_in_any_place(engine, gateway, path):
    key = gateway.open()
    before = state_of(gateway)
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
        for target, headers in carriers(key, path):
            got = gateway.request(method, target, b'{"value": 1, "version": 7, "timeout_s": 0}', headers)
            assert got.status in (401, 403, 404, 405), (method, target, got)
    assert engine.received == []
    assert state_of(gateway) == before


TRICKS = [
    "/v1/../admin/pause", "/v1/%2e%2e/admin/pause", "/v1/..%2fadmin%2fpause", "/v1/%2e%2e%2fadmin/pause",
    "/v1/%252e%252e/admin/pause", "/v1/chat/completions/../../../admin/pause", "/v1/models/../../control/load_weights",
    "/v1/models/..", "/v1/models/%2e%2e/%2e%2e/control/pause", "/v1/models//../x", "/v1/models/..\\..\\control",
    "//admin/pause", "/v1//admin/pause", "/v1//chat/completions", "//v1/chat/completions", "/v1/./chat/completions",
    "/ADMIN/pause", "/Admin/Pause", "/V1/chat/completions", "/v1/Chat/Completions", "/%61dmin/pause",
    "/v1%2fchat%2fcompletions", "/v1/chat%2fcompletions", "/v1/chat/completions/", "/v1/chat/completions%00",
    "/v1/chat/completions%20", "/v1/chat/completions;x", "/v1/models/%00", "/v1/models/%0d%0ax:%20y", "/../admin/pause",
    "/%2e%2e/%2e%2e/admin/pause", "/s/ork-other/admin/pause", "/./admin/pause", "/v1/%5c..%5cadmin",
]  # fmt: skip


@pytest.mark.parametrize("trick", TRICKS)
def test_paths_that_pretend_lead_nowhere(engine, gateway, trick):
    key = gateway.open()
    before = state_of(gateway)
    for method in ("GET", "POST"):
        for target, headers in carriers(key, trick):
            got = gateway.request(method, target, json.dumps(BODY).encode(), headers)
            assert got.status in (400, 401, 404), (method, target, got)
    assert engine.received == []
    assert state_of(gateway) == before


@pytest.mark.parametrize("mode", ["passthrough", "record"])
@pytest.mark.parametrize("trick", [trick for trick in TRICKS if trick.startswith("/v1/") and ".." in trick])
def test_without_a_key_too_no_path_climbs_out_of_the_upstreams_v1(engine, start, mode, trick):
    with start(mode=mode) as gateway:
        assert gateway.request("POST", trick, b"{}").status == 404
        assert engine.received == []


def test_an_agent_neither_sees_nor_changes_what_belongs_to_another(engine, gateway):
    mine, other = gateway.open("attempt-1"), gateway.open("attempt-2")
    gateway.chat(other)
    responses = {"model": "m", "input": "secret words"}
    theirs = gateway.post(f"/s/{other}/v1/responses", responses).json["id"]
    got = gateway.post(f"/s/{mine}/v1/responses", {**responses, "previous_response_id": theirs})
    assert got.status == 404
    assert b"secret words" not in got.body
    gateway.chat(mine, extra={"attempt_id": "attempt-2"})
    gateway.post(f"/s/{mine}{CHAT}", BODY, {"x-outrider-trajectory": "attempt-2", "x-outrider-attempt": "attempt-2"})
    assert len(gateway.store.calls("attempt-1")) == 2
    assert len(gateway.store.calls("attempt-2")) == 2


def test_the_key_in_the_path_wins_so_that_a_leaked_one_moves_no_call(gateway):
    mine, other = gateway.open("attempt-1"), gateway.open("attempt-2")
    gateway.post(f"/s/{mine}{CHAT}", BODY, {"authorization": f"Bearer {other}"})
    assert (len(gateway.store.calls("attempt-1")), gateway.store.calls("attempt-2")) == (1, [])


def test_a_hash_from_the_store_opens_nothing(engine, gateway):
    key = gateway.open()
    for guess in (hash_key(key), key.lower(), key[:-1], key + "x", key.upper(), "ork-", "%", ADMIN_KEY):
        assert gateway.post(f"/s/{guess}{CHAT}", BODY).status == 401
    assert engine.received == []


def test_the_admin_key_opens_no_model_route(engine, gateway):
    for target, headers in carriers(ADMIN_KEY, CHAT):
        assert gateway.post(target, BODY, headers).status == 401
    assert engine.received == []


def test_no_key_of_ours_reaches_the_upstream(engine, gateway):
    key, other = gateway.open(), gateway.open("attempt-2")
    headers = {"authorization": f"Bearer {other}", "x-api-key": key, "x-outrider-trajectory": "x"}
    for path in (CHAT, "/v1/messages", "/v1/responses"):
        gateway.post(f"/s/{key}{path}", BODY | {"input": "x", "max_tokens": 5}, headers)
    gateway.request("GET", f"/s/{key}/v1/models", headers=headers)
    assert len(engine.received) == 4
    for received in engine.received:
        assert "ork-" not in repr(received.headers) + received.path + received.query


# -- the wire ----------------------------------------------------------------------------------------------------------


def raw(gateway, data):
    """What comes back for these bytes, until the connection closes."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


FRAMINGS = {
    "both lengths": b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
    "chunked first": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n",
    "two lengths": b"content-length: 4\r\ncontent-length: 5\r\n",
    "lengths in one": b"content-length: 4, 5\r\n",
    "negative": b"content-length: -1\r\n",
    "plus": b"content-length: +4\r\n",
    "space before the colon": b"content-length : 4\r\n",
    "not quite chunked": b"transfer-encoding: xchunked\r\n",
    "chunked and more": b"transfer-encoding: chunked, identity\r\n",
    "folded": b"transfer-encoding:\r\n chunked\r\n",
    "bare line feed": b"x: y\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n",
    "nul": b"x: a\0b\r\ncontent-length: 4\r\n",
}


@pytest.mark.parametrize("framing", FRAMINGS.values(), ids=FRAMINGS.keys())
def test_a_request_that_is_framed_in_two_ways_hides_no_other(engine, gateway, framing):
    body = b"4\r\n\r\n\r\n\r\n0\r\n\r\n"
    head = f"POST /s/{gateway.open()}{CHAT} HTTP/1.1\r\nhost: x\r\n".encode() + framing + b"\r\n"
    answers = raw(gateway, head + body)
    assert not answers.startswith(b"HTTP/1.1 200")
    assert answers.count(b"HTTP/1.1 ") <= 1
    assert engine.received == []


@pytest.mark.parametrize("name", ["x-test", "authorization", "anthropic-beta"])
@pytest.mark.parametrize("value", [b"a\rb", b"a\r\n b", b"a\nx-injected: 1"])
def test_a_header_brings_no_second_one_upstream(engine, gateway, name, value):
    body = json.dumps(BODY).encode()
    head = f"POST /s/{gateway.open()}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{name}: ".encode()
    raw(gateway, head + value + b"\r\nconnection: close\r\n\r\n" + body)
    for received in engine.received:
        assert "x-injected" not in received.headers
        assert not any(mark in sent for sent in received.headers.values() for mark in "\r\n")


def test_the_agents_hop_by_hop_headers_cut_nothing_off(engine, gateway):
    headers = {
        "connection": "close, authorization, x-api-key",
        "proxy-authorization": "x",
        "te": "trailers",
        "host": "evil",
    }
    gateway.post(f"/s/{gateway.open()}{CHAT}", BODY, headers)
    received = engine.received[0].headers
    assert received["host"] == f"127.0.0.1:{engine.port}"
    assert not {"te", "proxy-authorization"} & received.keys()


@pytest.mark.parametrize("target", [b"http://127.0.0.1:1/admin/pause", b"http://x/v1/chat/completions", b"*", b"x:1"])
def test_other_forms_of_a_target_open_nothing(engine, gateway, target):
    for method in (b"POST", b"CONNECT", b"OPTIONS"):
        answers = raw(gateway, method + b" " + target + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        assert not answers.startswith(b"HTTP/1.1 200")
    assert engine.received == []
    assert gateway.client.health()["paused"] is False
