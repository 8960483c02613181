"""Keys, routes and requests that don't go upstream."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard

from fakes.gateway import CHAT, COMPLETIONS, MESSAGES, RunningGateway
from outrider.gateway.options import GatewayOptions
from outrider.gateway.sessions import TRAJECTORY_PREFIX
from outrider.keys import hash_key, new_key
from outrider.types import Fidelity, Mode

BODY = {"model": "policy", "messages": MESSAGES}


def refused(gateway, engine, got, status, code=None):
    """An error in OpenAI's shape, and nothing reached the engine or the store."""
    assert got.status == status, got.body
    error = got.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code is not None:
        assert error["code"] == code
    assert engine.received == []
    assert gateway.store.calls_after(0) == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_R08_the_key_of_an_ended_attempt_is_refused_at_once(engine, gateway, path):
    key = gateway.open("attempt-1")
    gateway.store.seal("attempt-1")
    refused(gateway, engine, gateway.post(f"/s/{key}{path}", BODY), 403, "attempt_ended")
    refused(gateway, engine, gateway.post(path, BODY, {"authorization": f"Bearer {key}"}), 403, "attempt_ended")


def test_R08_a_seal_between_two_calls_counts_for_the_second(engine, gateway):
    key = gateway.open("attempt-1")
    other = gateway.open("attempt-2")
    assert gateway.chat(key).status == 200
    gateway.store.seal("attempt-1")
    assert gateway.chat(key).status == 403
    assert gateway.chat(other).status == 200
    assert len(gateway.store.calls("attempt-1")) == 1


def test_unknown_expired_and_missing_keys_are_refused(engine, gateway):
    refused(gateway, engine, gateway.post(f"/s/{new_key()}{CHAT}", BODY), 401, "invalid_api_key")
    refused(gateway, engine, gateway.post(f"/s/{CHAT}", BODY), 401, "invalid_api_key")
    refused(gateway, engine, gateway.post(f"/s/%ff%00{CHAT}", BODY), 401, "invalid_api_key")
    expired = gateway.open(expires_at=time.time() - 1)
    refused(gateway, engine, gateway.post(f"/s/{expired}{CHAT}", BODY), 401, "key_expired")
    refused(gateway, engine, gateway.post(CHAT, BODY), 401, "missing_attempt_key")
    refused(gateway, engine, gateway.post(CHAT, BODY, {"authorization": "Bearer sk-x"}), 401, "missing_attempt_key")
    headers = {"authorization": f"bearer {new_key()}"}
    refused(gateway, engine, gateway.post(CHAT, BODY, headers), 401, "invalid_api_key")
    counted = gateway.client.stats()["refused"]
    assert counted == {"invalid_api_key": 4, "key_expired": 1, "missing_attempt_key": 2}


def test_a_key_that_does_not_expire_yet_is_taken(gateway):
    assert gateway.chat(gateway.open(expires_at=time.time() + 60)).status == 200


@pytest.mark.parametrize("target", ["/v1/nothing", "/v1/load_lora_adapter", "/v1/models/../x", "/v1/models/%2e%2e/x"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_key_opens_model_endpoints_only(engine, gateway, method, target):
    refused(gateway, engine, gateway.request(method, f"/s/{gateway.open()}{target}", b"{}"), 404)


@pytest.mark.parametrize("path", ["/", "/nothing", "/v2/x", "/s", "/s/x", "/s/x/health", "/admin", "/healthz"])
def test_an_unknown_route_is_404_in_the_protocols_shape(engine, gateway, path):
    refused(gateway, engine, gateway.request("GET", path), 404)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "has to end in /v1."),
        ("/messages", "has to end in /v1."),
        ("/v1/v1/messages", "must not end in it."),
        ("/v1/other", "There is no POST /v1/other here."),
    ],
)
def test_a_base_url_with_or_without_v1_is_pointed_out(engine, gateway, path, hint):
    got = gateway.post(f"/s/{gateway.open()}{path}", {})
    assert got.status == 404
    assert got.json["error"]["message"].endswith(hint)
    assert engine.received == []


def test_a_model_route_takes_post_only(engine, gateway):
    refused(gateway, engine, gateway.request("GET", f"/s/{gateway.open()}{CHAT}"), 405)


def test_models_are_the_upstreams(engine, gateway):
    got = gateway.request("GET", f"/s/{gateway.open()}/v1/models")
    assert got.json["data"][0]["id"] == "policy"
    assert gateway.request("GET", "/v1/models").status == 401


def test_health_needs_no_key(gateway):
    assert gateway.request("GET", "/health").json["status"] == "ok"


# -- bodies ------------------------------------------------------------------------------------------------------------

BAD_BODIES = {
    "empty": b"",
    "cut": b'{"messages": [',
    "not an object": b"[1]",
    "not json": b"hello",
    "two values": b'{"messages": []} {}',
    "bad utf-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "bad utf-8 in an unknown field": b'{"messages": [], "x": "\xc3("}',
    "deep": b'{"messages": [], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"messages": [], "x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "no messages": b'{"model": "m"}',
    "messages is a string": b'{"messages": "hi"}',
    "a message is a string": b'{"messages": ["hi"]}',
    "a message without a role": b'{"messages": [{"content": "hi"}]}',
    "stream is a string": b'{"messages": [], "stream": "true"}',
    "temperature is a string": b'{"messages": [], "temperature": "hot"}',
    "n is a float": b'{"messages": [], "n": 1.5}',
    "model is a number": b'{"messages": [], "model": 5}',
    "stream_options is a list": b'{"messages": [], "stream_options": []}',
    "NaN": b'{"messages": [], "temperature": NaN}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_is_400_and_never_goes_upstream(engine, gateway, body):
    refused(gateway, engine, gateway.post(f"/s/{gateway.open()}{CHAT}", body), 400)


@pytest.mark.parametrize("body", [b'{"prompt": {"a": 1}}', b'{"prompt": [1.5]}', b'{"prompt": "x", "logprobs": true}'])
def test_a_bad_completions_body_is_400(engine, gateway, body):
    refused(gateway, engine, gateway.post(f"/s/{gateway.open()}{COMPLETIONS}", body), 400)


def test_the_message_names_the_field(gateway):
    got = gateway.chat(gateway.open(), messages=[{"role": "user"}, {"role": 5}])
    assert "messages[1].role" in got.json["error"]["message"]


def test_a_body_over_the_limit_is_413(engine, start):
    with start(mode="train", max_body_mb=0.01) as gateway:
        path = f"/s/{gateway.open()}{CHAT}"
        big = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        refused(gateway, engine, gateway.post(path, big), 413, "request_too_large")
        huge = b"x" * (8 << 20)  # more than socket buffers hold: the agent still gets to read the answer
        refused(gateway, engine, gateway.post(path, huge), 413, "request_too_large")
        chunked = {"transfer-encoding": "chunked"}
        body = b"4e20\r\n" + b"x" * 20_000 + b"\r\n0\r\n\r\n"
        refused(gateway, engine, gateway.request("POST", path, body, chunked), 413)
        packed = gzip.compress(b'{"messages": [], "x": "' + b"x" * 1_000_000 + b'"}')
        assert len(packed) < 10_000
        refused(gateway, engine, gateway.post(path, packed, {"content-encoding": "gzip"}), 413)
        assert gateway.post(path, BODY).status == 200


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_an_encoded_body_is_recorded_plain(engine, gateway, name, pack):
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "x": "' + b"ab" * 5000 + b'"}'
    got = gateway.post(f"/s/{gateway.open()}{CHAT}", pack(body), {"content-encoding": name})
    assert got.status == 200
    assert "content-encoding" not in engine.received[0].headers
    assert gateway.call().request == body
    assert gateway.call().fidelity is Fidelity.EXACT


@pytest.mark.parametrize(("name", "status"), [("gzip", 400), ("zstd", 400), ("deflate", 400), ("br", 415)])
def test_a_broken_or_unknown_encoding_is_refused(engine, gateway, name, status):
    got = gateway.post(f"/s/{gateway.open()}{CHAT}", b"not packed at all", {"content-encoding": name})
    refused(gateway, engine, got, status)


# -- un-keyed traffic --------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(engine, start):
    with start(mode="record") as gateway:
        yield gateway


def test_unkeyed_calls_are_recorded_under_the_trajectory_they_name(engine, recording):
    key = {"authorization": "Bearer sk-secret", "x-outrider-trajectory": "chat/42"}
    recording.post(CHAT, BODY, key)
    recording.post(CHAT, BODY, key)
    calls = recording.recorded(2, TRAJECTORY_PREFIX + "chat/42")
    assert engine.received[0].headers["authorization"] == "Bearer sk-secret"
    assert "x-outrider-trajectory" not in engine.received[0].headers
    assert "sk-secret" not in repr(calls)


def test_unkeyed_calls_without_a_name_get_one_each(recording):
    recording.post(CHAT, BODY)
    recording.post(CHAT, BODY)
    first, second = recording.store.calls_after(0)
    assert first.attempt_id != second.attempt_id


def test_a_trajectory_name_cannot_be_an_attempt(engine, recording):
    recording.open("attempt-1")
    recording.post(CHAT, BODY, {"x-outrider-trajectory": "attempt-1"})
    assert recording.store.calls("attempt-1") == []
    refused_name = recording.post(CHAT, BODY, {"x-outrider-trajectory": "a b"})
    assert refused_name.status == 400


def test_a_keyed_session_keeps_its_own_mode_whatever_the_gateways_is(recording):
    recording.chat(recording.open(mode=Mode.TRAIN))
    assert recording.call().fidelity is Fidelity.EXACT


def test_a_store_that_is_far_away_holds_nobody_up(engine, gateway, monkeypatch):
    key, other = gateway.open(), gateway.open("attempt-2")
    arrived = threading.Event()
    read = gateway.store.session

    def slowly(key_hash):
        if key_hash == hash_key(key):
            assert arrived.wait(30), "the other calls waited for this one's session"
        return read(key_hash)

    monkeypatch.setattr(gateway.store, "session", slowly)
    monkeypatch.setattr(gateway.store, "remote", True, raising=False)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gateway.chat, key)
        assert gateway.chat(other).status == 200
        assert gateway.client.health()["status"] == "ok"
        assert not first.done()
        arrived.set()
        assert first.result(30).status == 200


@pytest.mark.parametrize(
    ("host", "upstream", "unkeyed", "taken"),
    [
        ("127.0.0.1", None, "auto", True),
        ("127.0.0.1", None, "refuse", False),
        ("0.0.0.0", None, "auto", False),
        ("0.0.0.0", None, "allow", True),
        ("0.0.0.0", "http://127.0.0.1:9,https://api.example.com", "auto", False),
    ],
)
@pytest.mark.parametrize("mode", ["passthrough", "record"])
def test_a_public_bind_opens_no_engine_to_callers_without_a_key(engine, tmp_path, host, upstream, unkeyed, taken, mode):
    options = {"host": host, "upstream": upstream or engine.base_url, "unkeyed": unkeyed, "mode": mode}
    with RunningGateway(engine, tmp_path / "s.sqlite3", **options) as gateway:
        for path, body in [(CHAT, BODY), ("/v1/messages/count_tokens", BODY), ("/v1/embeddings", {})]:
            got = gateway.post(path, body, {"authorization": "Bearer sk-some"})
            assert (got.status != 401) is taken
            if not taken:
                assert "--unkeyed allow" in got.json["error"]["message"]
        assert bool(engine.received) is taken
        if upstream is None:
            assert gateway.chat(gateway.open()).status == 200


def test_a_provider_behind_a_public_bind_asks_for_keys_itself():
    options = {"upstream": "https://api.example.com", "store": "sqlite:///x", "admin_key": "a"}
    assert GatewayOptions(host="0.0.0.0", **options).takes_unkeyed
    assert not GatewayOptions(host="0.0.0.0", unkeyed="refuse", **options).takes_unkeyed
