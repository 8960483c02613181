"""Feedback by an agent's key, rewards by a grader's, and who may do what."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES
from fakes.records import make_call
from outrider.errors import StoreBusy
from outrider.gateway.sessions import TRAJECTORY_PREFIX
from outrider.types import Attempt, Mode

KEYS = {"admin": ADMIN_KEY, "trainer": "ort-test", "grader": "org-test", "read": "orr-test"}
OPTIONS = {f"{role}_key": key for role, key in KEYS.items()}
REWARDS = "/admin/attempts/attempt-1/rewards"


@pytest.fixture
def gateway(start):
    with start(mode="train", reward_min=-1.0, reward_max=1.0, **OPTIONS) as gateway:
        gateway.store.put_attempt(Attempt(id="attempt-1", rollout_id="r", number=1))
        yield gateway


def by(role):
    return {"authorization": f"Bearer {KEYS[role]}"}


# -- a grader ----------------------------------------------------------------------------------------------------------


def test_a_grader_gives_a_reward_also_after_the_attempt_has_ended(gateway):
    gateway.open()
    gateway.store.seal("attempt-1")
    body = {"value": 0.5, "reason": "half right", "source": "judge", "parts": {"tests": 1.0, "style": -2}}
    got = gateway.post(REWARDS, body, by("grader"))
    assert got.status == 200
    (reward,) = gateway.store.rewards("attempt-1")
    assert (reward.name, reward.value, reward.reason, reward.source) == ("final", 0.5, "half right", "judge")
    assert reward.parts == {"tests": 1.0, "style": -2.0}
    assert abs(reward.created_at - time.time()) < 60
    assert got.json == {
        "attempt_id": "attempt-1",
        "name": "final",
        "value": 0.5,
        "source": "judge",
        "seq": got.json["seq"],
    }
    assert gateway.request("GET", REWARDS, headers=by("read")).json[0]["reason"] == "half right"
    assert gateway.client.stats()["rewards"] == {"judge final": 1}


def test_a_reward_for_one_call_names_a_call_of_that_attempt(gateway):
    gateway.open()
    gateway.store.append_call(make_call("c1", "attempt-1")).result(30)
    gateway.store.append_call(make_call("c2", "attempt-2")).result(30)
    assert gateway.post(REWARDS, {"value": 0.5, "call_id": "c1"}, by("grader")).status == 200
    assert [(reward.name, reward.call_id) for reward in gateway.store.rewards("attempt-1")] == [("final", "c1")]
    for unknown in ("c2", "c3"):
        got = gateway.post(REWARDS, {"value": 0.5, "call_id": unknown}, by("grader"))
        assert (got.status, got.json["error"]["code"]) == (404, "unknown_call")
    assert len(gateway.store.rewards("attempt-1")) == 1


def test_without_a_source_the_role_is_the_source(gateway):
    gateway.post(REWARDS, {"value": 1, "name": "style"}, by("trainer"))
    (reward,) = gateway.store.rewards("attempt-1")
    assert (reward.name, reward.value, reward.source) == ("style", 1.0, "trainer")


def test_a_production_trajectory_is_rewarded_under_its_own_name(start):
    with start(mode="record", **OPTIONS) as gateway:
        gateway.post(CHAT, {"messages": MESSAGES}, {"x-outrider-trajectory": "chat/42"})
        path = "/admin/attempts/trajectory%3Achat%2F42/rewards"
        assert gateway.post(path, {"value": 1.0}, by("grader")).status == 200
        assert gateway.store.rewards(TRAJECTORY_PREFIX + "chat/42")[0].value == 1.0
        assert gateway.post(path.replace("42", "43"), {"value": 1.0}, by("grader")).status == 404


BAD = {
    b'{"value": NaN}': ("value", "not_finite"),
    b'{"value": Infinity}': ("value", "not_finite"),
    b'{"value": -Infinity}': ("value", "not_finite"),
    b'{"value": 1e999}': ("value", "not_finite"),
    b'{"value": "NaN"}': ("value", None),
    b'{"value": "1"}': ("value", None),
    b'{"value": true}': ("value", None),
    b'{"value": null}': ("value", None),
    b"{}": ("value", None),
    b'{"value": 1.01}': ("value", "out_of_range"),
    b'{"value": -1e308}': ("value", "out_of_range"),
    b'{"value": 1, "parts": {"a": NaN}}': ("parts.a", "not_finite"),
    b'{"value": 1, "parts": {"a": "b"}}': ("parts", None),
    b'{"value": 1, "name": "a b"}': ("name", None),
    b'{"value": 1, "name": 5}': ("name", None),
    b'{"value": 1, "rollout": "x"}': ("rollout", None),
    b'{"value": 1, "reason": "' + b"x" * 20_001 + b'"}': ("reason", None),
    b"[1]": ("object", None),
    b"1": ("object", None),
    b"{": ("", None),
    b"\xff": ("", None),
    b"": ("", None),
    b"[" * 60_000: ("", None),
}


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:40].decode("latin-1"))
def test_R09_a_reward_that_is_no_number_in_bounds_is_refused_and_named(gateway, body):
    field, code = BAD[body]
    allowed = gateway.open(allow_feedback=True)
    for got in (gateway.post(REWARDS, body, by("grader")), gateway.post(f"/s/{allowed}/feedback", body)):
        assert got.status == 400
        assert field in got.json["error"]["message"]
        assert got.json["error"]["code"] == code
    assert gateway.store.rewards("attempt-1") == []


def test_a_body_over_64_kib_is_413(gateway):
    assert gateway.post(REWARDS, b'{"value": 1}' + b" " * 70_000, by("grader")).status == 413


def test_an_attempt_that_nobody_knows_is_404(gateway):
    got = gateway.post("/admin/attempts/attempt-2/rewards", {"value": 1}, by("grader"))
    assert (got.status, got.json["error"]["code"]) == (404, "unknown_attempt")


def test_a_store_that_is_full_says_come_back(gateway, monkeypatch):
    def add_reward(reward):
        raise StoreBusy("the queue is full")

    monkeypatch.setattr(gateway.store, "add_reward", add_reward)
    got = gateway.post(REWARDS, {"value": 1}, by("grader"))
    assert got.status == 503
    assert int(got.headers["retry-after"]) > 0


# -- an agent ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("place", ["path", "v1", "header"])
def test_an_agent_gives_feedback_on_its_own_attempt_where_that_is_allowed(gateway, place, sealed):
    key = gateway.open(allow_feedback=True)
    if sealed:
        gateway.store.seal("attempt-1")
    path = {"path": f"/s/{key}/feedback", "v1": f"/s/{key}/v1/feedback", "header": "/v1/feedback"}[place]
    headers = {"x-api-key": key} if place == "header" else {}
    got = gateway.post(path, {"value": 1, "reason": "thumbs up", "source": "grader"}, headers)
    assert got.status == 200
    (reward,) = gateway.store.rewards("attempt-1")
    assert (reward.name, reward.source, reward.reason) == ("feedback", "agent:grader", "thumbs up")


def test_an_agents_feedback_is_not_the_reward_that_counts(gateway, start):
    key = gateway.open(allow_feedback=True)
    got = gateway.post(f"/s/{key}/feedback", {"value": 1, "name": "final"})
    assert (got.status, got.json["error"]["code"]) == (403, "final_not_allowed")
    assert gateway.store.rewards("attempt-1") == []
    with start(mode="train", agent_final=True) as lenient:
        assert lenient.post(f"/s/{key}/feedback", {"value": 1, "name": "final"}).status == 200
        assert [reward.name for reward in lenient.store.rewards("attempt-1")] == ["final"]


def test_feedback_needs_a_key_that_may_give_it(gateway):
    body = {"value": 1}
    assert gateway.post("/v1/feedback", body).json["error"]["code"] == "missing_attempt_key"
    assert gateway.post("/s/ork-x/feedback", body).json["error"]["code"] == "invalid_api_key"
    got = gateway.post(f"/s/{gateway.open()}/feedback", body)
    assert (got.status, got.json["error"]["code"]) == (403, "feedback_not_allowed")
    expired = gateway.open(allow_feedback=True, expires_at=time.time() - 1)
    assert gateway.post(f"/s/{expired}/feedback", body).json["error"]["code"] == "key_expired"
    assert gateway.request("GET", f"/s/{expired}/feedback").status == 405
    assert gateway.store.rewards("attempt-1") == []


# -- roles -------------------------------------------------------------------------------------------------------------

ROUTES = {
    ("POST", "/admin/pause"): {"admin", "trainer"},
    ("POST", "/admin/resume"): {"admin", "trainer"},
    ("POST", "/admin/attempts"): {"admin", "trainer"},
    ("POST", "/admin/attempts/attempt-1/seal"): {"admin", "trainer"},
    ("GET", "/admin/attempts/attempt-1"): {"admin", "trainer", "grader", "read"},
    ("POST", REWARDS): {"admin", "trainer", "grader"},
    ("GET", REWARDS): {"admin", "trainer", "grader", "read"},
    ("GET", "/admin/attempts/attempt-1/calls"): {"admin", "trainer", "grader", "read"},
    ("GET", "/admin/stats"): {"admin", "trainer", "grader", "read"},
}
BODIES = {"/admin/pause": {"timeout_s": 0}, "/admin/resume": {"version": 1}, REWARDS: {"value": 1}}


@pytest.mark.parametrize("role", KEYS)
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_each_role_opens_what_it_should_and_nothing_else(gateway, role, route):
    gateway.open()
    method, path = route
    body = json.dumps(BODIES.get(path, {})).encode() if method == "POST" else None
    got = gateway.request(method, path, body, by(role))
    if role in ROUTES[route]:
        assert got.status == 200, got.body
    else:
        assert (got.status, got.json["error"]["code"]) == (403, "wrong_role")
        assert gateway.store.rewards("attempt-1") == []
        assert gateway.client.health()["paused"] is False


def test_a_key_may_be_given_as_its_hash_and_several_as_a_list(start):
    hashed = "sha256:" + hashlib.sha256(b"secret").hexdigest()
    with start(admin_key=f"one, {hashed}") as gateway:
        for key, status in [("one", 200), ("secret", 200), (hashed, 401), ("one, secret", 401), ("", 401)]:
            got = gateway.request("GET", "/admin/stats", headers={"authorization": f"Bearer {key}"})
            assert got.status == status


def test_a_reader_sees_calls_and_no_token_ids(gateway):
    gateway.chat(gateway.open())
    (call,) = gateway.request("GET", "/admin/attempts/attempt-1/calls", headers=by("read")).json
    assert json.loads(call["request"])["messages"] == MESSAGES
    assert (call["fidelity"], call["state"], call["dialect"]) == ("exact", "complete", "openai_chat")
    assert gateway.request("GET", "/admin/attempts/attempt-2/calls", headers=by("read")).status == 404
    assert gateway.request("DELETE", "/admin/attempts/attempt-1/calls", headers=by("admin")).status == 404
    assert gateway.open("x", mode=Mode.EVAL)
