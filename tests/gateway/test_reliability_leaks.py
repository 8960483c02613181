"""Places for a secret that nobody looks at: each was one where it stayed in the store."""

from __future__ import annotations

import json

import pytest

from fakes.engine import Answer
from fakes.gateway import CHAT, MESSAGES
from outrider.types import Fidelity, Mode

SECRET = "sk-ant-" + "api03-" + "x9Y" * 12  # put together here, so that no scanner takes this file for a leak
CALL = {"model": "policy", "messages": MESSAGES}
BODIES = {
    "a name": json.dumps(CALL | {"metadata": {SECRET: 1}}),
    "a name of a name": json.dumps(CALL | {"metadata": {"a": [{SECRET: {"b": SECRET}}]}}),
    "the model": json.dumps(CALL | {"model": SECRET}),
    "a stop sequence": json.dumps(CALL | {"stop": [SECRET]}),
    "the first of two names": json.dumps(CALL)[:-1] + f', "user": "{SECRET}", "user": "me"}}',
    "inside one of two names": json.dumps(CALL)[:-1] + f', "x": {{"a": {{"b": "{SECRET}"}}, "a": "\\\\"}}}}',
    "spelled with escapes": json.dumps(CALL)[:-1] + ', "user": "' + "".join(f"\\u{ord(c):04x}" for c in SECRET) + '"}',
    "beside a number out of range": json.dumps(CALL)[:-1] + f', "x": 1e999, "user": "{SECRET}"}}',
}


def everything(call):
    return repr(call) + json.dumps(json.loads(call.request)) if b"1e999" not in call.request else repr(call)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_secret_in_an_unusual_place_of_a_request(engine, gateway, body):
    got = gateway.post(f"/s/{gateway.open(mode=Mode.RECORD)}{CHAT}", body.encode())
    assert got.status == 200
    assert engine.received[0].body == body.encode()
    call = gateway.call()
    assert SECRET not in everything(call)
    assert call.fidelity is Fidelity.TEXT


def test_a_secret_in_an_answer_that_has_a_name_twice(engine, gateway):
    first = json.dumps({"content": SECRET})
    answer = f'{{"choices": [{{"index": 0, "message": {first}, "finish_reason": "stop", "message": {{}}}}]}}'
    engine.answers.append(Answer(chunks=[answer.encode()]))
    gateway.chat(gateway.open(mode=Mode.RECORD))
    assert SECRET not in everything(gateway.call())


def test_a_request_without_a_secret_is_kept_to_the_byte(engine, gateway):
    odd = r'"a_name_that_is_long_enough": "\"\\\\\" \\\" \u0022 é \ud83d\ude00 \/", "x": [1.0, 1e5, "\\"], "": {"": ""}'
    body = f"{json.dumps(CALL)[:-1]}, {odd}}}".encode()
    gateway.post(f"/s/{gateway.open(mode=Mode.RECORD)}{CHAT}", body)
    assert gateway.call().request == body
    assert gateway.client.stats()["redacted"] == {}
