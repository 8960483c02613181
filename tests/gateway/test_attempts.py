"""Attempts that are opened, ended and looked at over HTTP."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import time
from pathlib import Path

import openai
import pytest

from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES, RunningGateway
from outrider.errors import EngineError
from outrider.keys import hash_key
from outrider.types import Mode

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
BODY = {"model": "policy", "messages": MESSAGES}


def test_an_attempt_from_its_key_to_its_seal(engine, gateway):
    opened = gateway.client.open_attempt("task/1", mode="train", sampling={"temperature": 0.5}, allow_feedback=True)
    key = opened["key"]
    assert opened["base_paths"] == {"openai": f"/s/{key}/v1", "anthropic": f"/s/{key}"}
    with openai.OpenAI(base_url=gateway.base_url + opened["base_paths"]["openai"], api_key="-") as client:
        client.chat.completions.create(**BODY)
    assert engine.received[0].json["temperature"] == 0.5
    assert gateway.post(f"/s/{key}/feedback", {"value": 1}).status == 200
    gateway.post("/admin/attempts/task%2F1/rewards", {"value": 0.5}, ADMIN)
    state = gateway.client.attempt("task/1")
    assert (state["sealed"], state["calls"], state["rollout_id"]) == (False, 1, None)
    assert (state["states"], state["fidelity"]) == ({"complete": 1}, {"exact": 1})
    assert state["rewards"] == {"feedback": 1.0, "final": 0.5}
    assert state["keys"] == [
        {"mode": "train", "sampling": {"temperature": 0.5}, "allow_feedback": True, "expires_at": None, "sealed": False}
    ]
    assert key not in json.dumps(state)
    assert hash_key(key) not in json.dumps(state)
    for _ in range(2):
        gateway.client.seal_attempt("task/1")
    assert gateway.client.attempt("task/1")["sealed"]
    assert gateway.post(f"/s/{key}{CHAT}", BODY).json["error"]["code"] == "attempt_ended"
    assert len(engine.received) == 1


def test_without_an_id_it_gets_one(gateway):
    first, second = gateway.client.open_attempt(), gateway.client.open_attempt()
    assert first["attempt_id"] != second["attempt_id"]
    assert first["key"] != second["key"]
    assert first["mode"] == "train"


def test_a_reward_may_come_before_the_first_call(gateway):
    gateway.client.open_attempt("a")
    assert gateway.post("/admin/attempts/a/rewards", {"value": 1}, ADMIN).status == 200


def test_a_key_expires(gateway):
    opened = gateway.client.open_attempt("a", expires_s=0.05)
    assert abs(opened["expires_at"] - time.time()) < 30
    time.sleep(0.1)
    assert gateway.post(f"/s/{opened['key']}{CHAT}", BODY).json["error"]["code"] == "key_expired"


@pytest.mark.parametrize("sealed", [False, True])
def test_an_id_is_taken_once(gateway, sealed):
    gateway.client.open_attempt("a")
    if sealed:
        gateway.client.seal_attempt("a")
    got = gateway.post("/admin/attempts", {"id": "a"}, ADMIN)
    assert (got.status, got.json["error"]["code"]) == (409, "attempt_exists")
    assert len(gateway.store.sessions("a")) == 1


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"id": "trajectory:x"}, "id"),
        ({"id": "a b"}, "id"),
        ({"id": "x" * 201}, "id"),
        ({"mode": "loud"}, "mode"),
        ({"sampling": 5}, "sampling"),
        ({"expires_s": 0}, "expires_s"),
        ({"expires_s": float("nan")}, "JSON"),
        ({"expires_s": 1e300}, "expires_s"),
        ({"key": "mine"}, "key"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named_and_opens_nothing(gateway, body, word):
    got = gateway.post("/admin/attempts", json.dumps(body).encode(), ADMIN)
    assert got.status == 400
    assert word in got.json["error"]["message"]


def test_what_nobody_opened_is_404(gateway):
    reads = [("GET", f"/admin/attempts/x{what}") for what in ("", "/calls", "/rewards")]
    for method, path in [*reads, ("POST", "/admin/attempts/x/seal")]:
        got = gateway.request(method, path, headers=ADMIN)
        assert (got.status, got.json["error"]["code"]) == (404, "unknown_attempt")
    with pytest.raises(EngineError, match="no attempt 'x'"):
        gateway.client.attempt("x")
    for method, path in [("GET", "/admin/attempts"), ("GET", "/admin/attempts/x/seal"), ("POST", "/admin/attempts/x")]:
        assert gateway.request(method, path, headers=ADMIN).status == 404


def test_an_attempts_key_opens_and_ends_nothing(gateway):
    opened = gateway.client.open_attempt("a")
    bearer = {"authorization": f"Bearer {opened['key']}"}
    for path in ("/admin/attempts", "/admin/attempts/a/seal"):
        assert gateway.post(path, {}, bearer).status == 401
        assert gateway.post(f"/s/{opened['key']}{path}", {}, bearer).status == 404
    assert gateway.request("GET", "/admin/attempts/a", headers=bearer).status == 401
    assert not gateway.client.attempt("a")["sealed"]


def test_a_recorded_attempt_keeps_its_mode_and_another_gateway_knows_it(engine, tmp_path):
    store = tmp_path / "s.sqlite3"
    with RunningGateway(engine, store, mode="passthrough") as one, RunningGateway(engine, store) as other:
        key = one.client.open_attempt("a", mode="record")["key"]
        assert other.post(f"/s/{key}{CHAT}", BODY).status == 200
        assert other.store.session(hash_key(key)).mode is Mode.RECORD
        assert one.client.attempt("a")["calls"] == 1
        one.client.seal_attempt("a")
        assert other.post(f"/s/{key}{CHAT}", BODY).status == 403


def test_the_commands_of_the_docs_do_what_they_say(gateway):
    """As curl would send them: method, headers, body."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    section = page.partition("## Attempts over HTTP")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.S | re.M)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    assert len(lines) == 3
    answers = []
    for line in lines:
        words = shlex.split(line.replace("$OUTRIDER_ADMIN_KEY", ADMIN_KEY))
        options = dict(itertools.pairwise(words))
        name, _, value = options["-H"].partition(": ")
        path = next(word for word in words if word.startswith("http")).removeprefix("http://127.0.0.1:8080")
        body = options.get("-d")
        got = gateway.request(options.get("-X", "GET"), path, body and body.encode(), {name: value})
        assert got.status == 200, (line, got.body)
        answers.append(got.json)
    shown = json.loads(re.search(r"^```json\n(.*?)^```$", section, re.S | re.M)[1])
    assert set(answers[0]) == set(shown)
    assert (answers[0]["attempt_id"], answers[0]["mode"]) == (shown["attempt_id"], shown["mode"])
    assert (answers[1]["sealed"], answers[1]["calls"]) == (False, 0)
    assert answers[2] == {"attempt_id": "ticket-4711", "sealed": True}
    assert gateway.client.attempt("ticket-4711")["sealed"]
    assert gateway.request("GET", "/admin/attempts/ticket-4711/calls", headers=ADMIN).json == []
