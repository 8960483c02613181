"""Policy versions and the pause around a publish."""

from __future__ import annotations

import threading
import time

import pytest

from fakes.engine import chunk, stream
from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES, wait_for
from outrider.errors import EngineError, SetupError
from outrider.gateway.client import GatewayClient
from outrider.types import Mode


def hold(engine):
    """The next streamed answer waits before its last chunk until the event is set."""
    gate = threading.Event()
    chunks = [chunk({"content": "a"}), chunk({"content": "b"}, finish_reason="stop")]
    engine.answers.append(stream(*chunks, gate=gate))
    return gate


def test_R12_calls_carry_the_version_at_their_start_and_end(engine, gateway):
    key = gateway.open()
    gateway.client.resume(3)
    gateway.chat(key)
    gate = hold(engine)
    raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES, "stream": True})
    wait_for(lambda: len(engine.received) == 2)
    gateway.client.resume(4)
    gate.set()
    gateway.recorded(2)
    raw.close()
    gateway.chat(key)
    assert [(c.version_start, c.version_end) for c in gateway.recorded(3)] == [(3, 3), (3, 4), (4, 4)]


def test_R12_only_a_resume_counts(engine, gateway):
    gateway.client.resume(1)
    assert gateway.client.pause(1.0) == 0
    assert gateway.client.pause(1.0) == 0
    assert gateway.client.health()["policy_version"] == 1
    gateway.client.resume(1)
    gateway.chat(gateway.open())
    assert gateway.call().version_start == 1


def test_without_a_resume_there_is_no_version(gateway):
    gateway.chat(gateway.open())
    assert gateway.call().version_start is None


def test_recorded_provider_traffic_has_no_version(gateway):
    gateway.client.resume(1)
    gateway.chat(gateway.open(mode=Mode.RECORD))
    assert gateway.call().version_start is None
    assert gateway.call().version_end is None


def test_the_version_outlives_a_restart(engine, start):
    with start(mode="train") as first:
        first.client.resume(7)
    with start(mode="train") as second:
        second.chat(second.open())
        assert second.call().version_start == 7


def test_a_pause_drains_and_holds_new_calls_back_until_resume(engine, gateway):
    key = gateway.open()
    gate = hold(engine)
    raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES, "stream": True})
    wait_for(lambda: len(engine.received) == 1)
    assert gateway.client.pause(0.05) == 1  # one is still there at the deadline
    assert gateway.client.health()["paused"] is True

    late = threading.Thread(target=gateway.chat, args=(key,))
    late.start()
    gate.set()
    assert gateway.client.pause(30.0) == 0
    assert len(engine.received) == 1
    gateway.client.resume(2)
    late.join(30)
    calls = gateway.recorded(2)
    raw.close()
    assert [call.version_start for call in calls] == [None, 2]


def test_a_call_that_waits_too_long_gets_503_and_retry_after(engine, start):
    with start(mode="train", pause_wait_s=0.1) as gateway:
        key = gateway.open()
        gateway.client.pause(1.0)
        got = gateway.chat(key)
        assert got.status == 503
        assert int(got.headers["retry-after"]) > 0
        assert got.json["error"]["code"] == "paused"
        assert engine.received == []
        assert gateway.client.stats()["refused"] == {"paused": 1}
        gateway.client.resume(1)
        assert gateway.chat(key).status == 200


def test_a_client_that_leaves_during_the_pause_is_noticed_at_once(engine, gateway):
    key = gateway.open()
    gateway.client.pause(1.0)
    raw = gateway.open_socket(f"/s/{key}{CHAT}", {"messages": MESSAGES})
    time.sleep(0.1)
    raw.close()
    wait_for(lambda: gateway.client.stats()["refused"] == {"client_gone": 1})
    gateway.client.resume(1)
    assert gateway.client.pause(30.0) == 0
    assert engine.received == []
    assert gateway.store.calls_after(0) == []


# -- the admin side ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "ora-tes"}])
@pytest.mark.parametrize("path", ["/admin/pause", "/admin/resume", "/admin/stats", "/admin/nothing"])
def test_admin_routes_need_the_admin_key(gateway, headers, path):
    got = gateway.request("GET" if path.endswith("stats") else "POST", path, b"{}", headers)
    assert got.status == 401
    assert got.json["error"]["code"] == "invalid_admin_key"
    assert gateway.client.health()["paused"] is False


def test_an_attempt_key_does_not_open_admin_routes(gateway):
    key = gateway.open()
    for path in ("/admin/pause", f"/s/{key}/admin/pause", f"/s/{key}/v1/../../admin/pause"):
        assert gateway.request("POST", path, b"{}", {"authorization": f"Bearer {key}"}).status in (401, 404)
    assert gateway.client.health()["paused"] is False


def test_an_empty_admin_key_opens_nothing(engine, start):
    with start(admin_key="") as gateway:
        for header in ("Bearer ", "Bearer", ""):
            assert gateway.request("POST", "/admin/pause", b"{}", {"authorization": header}).status == 401


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"version": "1"}', b'{"version": -1}', b'{"x": 1}'])
def test_a_bad_admin_request_is_refused_and_changes_nothing(gateway, body):
    got = gateway.request("POST", "/admin/resume", body, {"authorization": f"Bearer {ADMIN_KEY}"})
    assert got.status == 400
    assert gateway.client.health()["policy_version"] is None


def test_a_bad_admin_request_names_the_field(gateway):
    got = gateway.request("POST", "/admin/resume", b'{"version": "1"}', {"authorization": f"Bearer {ADMIN_KEY}"})
    assert got.json["error"]["message"] == "The request is not valid: version: expected int | null, got str."


@pytest.mark.parametrize("version", [None, 4])
def test_a_resume_without_a_version_leaves_it(gateway, version):
    """For whoever ends a pause by hand."""
    if version is not None:
        gateway.client.resume(version)
    gateway.client.pause(1.0)
    assert gateway.request("POST", "/admin/resume", b"", {"authorization": f"Bearer {ADMIN_KEY}"}).status == 200
    assert gateway.client.health()["paused"] is False
    assert gateway.client.health()["policy_version"] == version
    assert gateway.chat(gateway.open()).status == 200
    assert gateway.call().version_start == version


def test_an_unknown_admin_route_is_404(gateway):
    assert gateway.request("POST", "/admin/x", b"", {"authorization": f"Bearer {ADMIN_KEY}"}).status == 404


def test_the_client_says_what_is_wrong(gateway):
    with pytest.raises(EngineError, match="401"):
        GatewayClient(gateway.base_url, "wrong").resume(1)
    with pytest.raises(EngineError, match="cannot be reached"):
        GatewayClient("http://127.0.0.1:1", "x").health()
    with pytest.raises(SetupError, match="did not come up"):
        GatewayClient("http://127.0.0.1:1", "x").wait_ready(0.1)
