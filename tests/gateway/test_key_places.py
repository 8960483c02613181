"""Where a key may stand in a request, and that none of the gateway's own ever goes upstream."""

from __future__ import annotations

import json

import pytest

from fakes.engine import Answer
from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES

BODY = json.dumps({"model": "policy", "messages": MESSAGES}).encode()
NAMES = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
FORMS = ("Bearer {}", "bearer  {}", "Bearer\t{}", "{}", "Token {}")


@pytest.fixture
def gateway(start):
    with start(mode="record", trainer_key="sha256:" + "ab" * 32, read_key="read-key-of-ours") as gateway:
        yield gateway


def sent(engine):
    return json.dumps([[one.path, one.query, one.headers] for one in engine.received])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", FORMS)
def test_an_attempt_key_is_known_in_every_header_of_a_key_and_stays_here(engine, gateway, name, form):
    key = gateway.open()
    assert gateway.post(CHAT, BODY, {name: form.format(key)}).status == 200
    assert gateway.call().attempt_id == "attempt-1"
    assert key not in sent(engine)


def test_of_two_attempt_keys_the_first_header_counts_and_neither_goes_upstream(engine, gateway):
    one, other = gateway.open("attempt-1"), gateway.open("attempt-2")
    assert gateway.post(CHAT, BODY, {"x-api-key": other, "authorization": f"Bearer {one}"}).status == 200
    assert len(gateway.recorded(1, "attempt-1")) == 1
    assert gateway.store.calls("attempt-2") == []
    assert one not in sent(engine)
    assert other not in sent(engine)


def test_beside_an_attempt_key_the_providers_goes_upstream(engine, gateway):
    key = gateway.open()
    assert gateway.post(CHAT, BODY, {"authorization": "Bearer sk-provider", "x-api-key": key}).status == 200
    assert engine.received[0].headers["authorization"] == "Bearer sk-provider"


@pytest.mark.parametrize("mode", ["record", "train"])
def test_a_providers_key_that_its_error_spells_is_not_stored_in_any_mode(engine, gateway, mode):
    secret = "provider-0123456789-of-mine"
    error = {"error": {"message": f"Incorrect API key provided: {secret}.", "code": "invalid_api_key"}}
    engine.answers.append(Answer(status=401, chunks=[json.dumps(error).encode()]))
    got = gateway.post(f"/s/{gateway.open(mode=mode)}{CHAT}", BODY, {"authorization": f"Bearer {secret}"})
    assert (got.status, got.json) == (401, error)
    call = gateway.call()
    assert secret.encode() not in call.response
    assert secret not in call.error
    assert b"[redacted:credential]" in call.response


def test_an_attempt_key_in_the_query_is_refused_with_what_to_do(engine, gateway):
    got = gateway.post(f"{CHAT}?key={gateway.open()}", BODY)
    assert got.status == 401
    assert "/s/KEY/v1" in got.json["error"]["message"]
    assert engine.received == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mine", [ADMIN_KEY, "read-key-of-ours"])
def test_a_key_for_admin_is_no_key_for_a_model(engine, gateway, name, mine):
    """Someone's agent was configured with it; the provider must not get it."""
    for path in (CHAT, "/v1/models", "/v1/embeddings", f"/s/{gateway.open(name + mine)}{CHAT}"):
        got = gateway.post(path, BODY, {name: f"Bearer {mine}"})
        assert got.status == 401
        assert mine not in got.body.decode()
    assert engine.received == []


@pytest.mark.parametrize("field", ["source", "reason"])
def test_feedback_that_cannot_be_written_down_is_refused_and_not_stored(gateway, field):
    key = gateway.open(allow_feedback=True)
    for fields in ({field: "\ud800"}, {"parts": {"\udfff": 1}}):
        got = gateway.post(f"/s/{key}/feedback", {"value": 1, **fields})
        assert got.status == 400
    assert gateway.store.rewards("attempt-1") == []
