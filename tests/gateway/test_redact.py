"""Secrets are taken out of what is stored, and nothing of what is forwarded changes."""

from __future__ import annotations

import json
import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.calls import text_call
from fakes.engine import Sampled, chunk, json_answer, sse, stream
from fakes.gateway import CHAT, MESSAGES
from outrider.gateway.redaction.redact import Redactor
from outrider.types import Fidelity, Mode

REDACTOR = Redactor(["proj-[0-9]{4}"])
# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "provider_key": [
        "sk-" + "proj-Ab3" * 6,
        "sk-ant-" + "api03-" + "x9Y" * 12,
        "AIza" + "Sy9" * 11 + "ab",
        "hf_" + "a1B" * 11,
    ],
    "outrider_key": ["ork-" + "a1B2" * 8],
    "aws_key": ["AKIA" + "ABCDEFGH12345678"],
    "github_token": ["ghp_" + "aB1" * 12],
    "slack_token": ["xoxb-" + "123456789012-" + "abcdefghij"],
    "stripe_key": ["sk_live_" + "a1B2c3D4" * 3],
    "jwt": ["eyJ" + "hbGciOiJIUzI1NiJ9" + "." + "eyJzdWIiOiIxMjM0In0" + "." + "c2lnbmF0dXJl"],
    "email": ["ada.lovelace+x@mail.example.org"],
    "pattern": ["proj-1234"],
}
ALL = [(kind, secret) for kind, secrets in SECRETS.items() for secret in secrets]


def request_with(text):
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


@pytest.mark.parametrize(("kind", "secret"), ALL)
@pytest.mark.parametrize("around", ["{}", "key={}\nnext", '{{"k": "{}"}}', "a\\n{}\\n", "Bearer {}", "(<{}>)", "{}."])
def test_a_secret_is_taken_out_of_a_message_and_the_rest_stays(kind, secret, around):
    text = around.format(secret)
    redacted, hits = REDACTOR.call(text_call(request_with(text)))
    content = json.loads(redacted.request)["messages"][0]["content"]
    assert secret not in content
    assert "[redacted:" in content
    head, tail = around.format("\0").split("\0")
    assert content.startswith(head)
    assert content.endswith(tail) or kind in ("email", "jwt")  # their last part may end with a full stop
    assert hits.total() == 1


@pytest.mark.parametrize(
    "text",
    [
        "The task-force asked sk-questions about ask-me-anything, and @mentions like @types/node or a@b.",
        "risk-adjusted-return-of-the-whole-portfolio, disk-usage, uuid 123e4567-e89b-12d3-a456-426614174000",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 in git 2fd4e1c67a2d28fced849ee1bb76",
        "http://host:8080/path?x=1@2 and ssh git@host and 10.0.0.1 and 12:34:56",
        "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4" * 20,
    ],
)
def test_harmless_text_stays_to_the_byte(text):
    call = text_call(request_with(text), b'{"x":  1.0}')
    redacted, hits = REDACTOR.call(call)
    assert redacted is call
    assert not hits


def test_a_private_key_goes_as_a_whole():
    body = "\n".join(["MIIEpAIBAAKCAQEA7bq9" * 3] * 20)
    pem = f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----"
    for text in (f"before {pem} after - all", json.dumps({"file": f"before {pem} after - all"})):
        redacted, hits = REDACTOR.call(text_call(request_with(text)))
        content = json.loads(redacted.request)["messages"][0]["content"]
        assert "before [redacted:private_key] after - all" in content
        assert hits == {"private_key": 1}


def test_a_password_in_an_url_goes_and_the_url_stays():
    redacted, _ = REDACTOR.call(text_call(request_with("git clone https://me:s3cret@host.example/x.git")))
    content = json.loads(redacted.request)["messages"][0]["content"]
    assert "s3cret" not in content
    assert content.startswith("git clone https://[redacted:password_in_url]")
    assert content.endswith("/x.git")


def test_the_callers_own_key_is_taken_out_whatever_it_looks_like():
    redacted, hits = REDACTOR.call(text_call(request_with("my key is hunter2-hunter2")), ["hunter2-hunter2", "ab"])
    assert b"hunter2" not in redacted.request
    assert hits == {"credential": 1}


def conversation(*texts):
    return text_call(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode())


def test_a_conversation_that_comes_again_is_looked_through_where_it_is_new(monkeypatch):
    redactor, looked = Redactor(), []
    spans = Redactor._spans
    monkeypatch.setattr(Redactor, "_spans", lambda self, text, keys: looked.append(text) or spans(self, text, keys))
    old, secret = "a long and harmless message " * 4, "write to ada@mail.example.org " * 4
    for _ in range(2):
        redacted, hits = redactor.call(conversation(old, secret))
        assert hits == {"email": 4}
        assert b"ada@" not in redacted.request
        assert old.encode() in redacted.request
    assert old in looked[0]
    assert not any(old in text for text in looked[1:])
    assert [secret in text for text in looked if text.strip("\n\0")] == [True, True]


def test_a_key_is_found_in_a_text_that_was_harmless_under_another_key():
    redactor = Redactor()
    call = conversation("the words hunter2-hunter2 stand in a text that is long enough to be remembered")
    assert redactor.call(call, ["another-key"])[1] == {}
    redacted, hits = redactor.call(call, ["hunter2-hunter2"])
    assert hits == {"credential": 1}
    assert b"hunter2" not in redacted.request
    assert redactor.call(call, ["hunter2-hunter2"])[1] == {"credential": 1}


def test_texts_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("outrider.gateway.redaction.seen.SEEN", 10)
    redactor = Redactor()
    for number in range(100):
        redactor.call(conversation(f"message number {number} of a talk that goes on and on without an end in sight"))
    assert len(redactor._seen._young) + len(redactor._seen._old) <= 20


@pytest.mark.parametrize("escaped", ["\\u0061da@mail.example.org", "ada\\u0040mail.example.org"])
def test_an_escape_hides_nothing(escaped):
    redacted, hits = REDACTOR.call(text_call(b'{"messages": [{"role": "user", "content": "%b"}]}' % escaped.encode()))
    assert hits == {"email": 1}
    assert b"mail.example" not in redacted.request


@pytest.mark.parametrize(
    "body", [b"plain ada@mail.example.org \xff", b'"ada@mail.example.org"', b'{"a": "ada@mail.example.org']
)
def test_a_body_that_is_no_json_object_is_looked_through_too(body):
    redacted, hits = REDACTOR.call(text_call(b"{}", body, error="for ada@mail.example.org"))
    assert b"ada@" not in redacted.response
    assert redacted.error == "for [redacted:email]"
    assert hits == {"email": 2}


PIECES = st.lists(st.integers(1, 5), min_size=1, max_size=30)


@given(PIECES, st.sampled_from(ALL), st.sampled_from(["content", "reasoning_content"]))
def test_a_secret_in_pieces_of_a_stream_is_found(sizes, secret, field):
    text = f"the key is {secret[1]} and {secret[1]}, so"
    cuts, position = [], 0
    while position < len(text):
        size = sizes[len(cuts) % len(sizes)]
        cuts.append(text[position : position + size])
        position += size
    raw = b"".join(sse(*[chunk({field: piece}) for piece in cuts]))
    redacted, hits = REDACTOR.call(text_call(b"{}", raw))
    events = [json.loads(line[6:]) for line in redacted.response.split(b"\n") if line.startswith(b"data: {")]
    shown = "".join(event["choices"][0]["delta"][field] for event in events)
    mark = f"[redacted:{secret[0]}]"
    assert shown == f"the key is {mark} and {mark}, so"
    assert hits.total() == 2
    assert redacted.response.endswith(b"data: [DONE]\n\n")
    assert len(events) == len(cuts)


def test_two_interleaved_calls_of_a_stream_are_two_texts():
    key = SECRETS["github_token"][0]
    pieces = []
    for at in range(0, len(key), 4):
        for index in (0, 1):
            pieces.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": key[at : at + 4]}}]}))
    redacted, hits = REDACTOR.call(text_call(b"{}", b"".join(sse(*pieces))))
    assert hits == {"github_token": 2}
    assert key[8:12].encode() not in redacted.response


@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_body_is_taken(body):
    for call in (text_call(body, body), text_call(body, b"data: " + body + b"\n\n")):
        redacted, hits = REDACTOR.call(call)
        assert hits or redacted is call


def test_what_is_found_in_a_large_body_is_found_soon():
    words = random.Random(0).choices(
        ["alpha", "beta@", "sk-", "eyJ", "://a:b", "-----BEGIN", "AKIA", "x" * 50], k=100_000
    )
    redacted, _ = REDACTOR.call(text_call(request_with(" ".join(words) + " ada@mail.example.org")))
    assert b"ada@mail" not in redacted.request


# -- through the gateway -----------------------------------------------------------------------------------------------

EMAIL = "ada@mail.example.org"


@pytest.mark.parametrize("streamed", [False, True])
def test_the_agent_and_the_engine_get_the_original(engine, start, streamed):
    engine.sampled = [Sampled(pieces=["ada@ma", "il.example", ".org", "!", ""])]
    with start(mode="record") as gateway:
        body = json.dumps({"model": "m", "stream": streamed, "messages": [{"role": "user", "content": EMAIL}]}).encode()
        got = gateway.post(CHAT, body, {"x-outrider-trajectory": "t"})
        assert engine.received[0].body == body
        assert got.body.replace(b'"}, "finish', b"").count(b"il.example") == 1
        (call,) = gateway.store.calls("trajectory:t")
        assert b"example" not in call.request
        assert b"il.example" not in call.response
        assert (call.fidelity, call.fidelity_reason.partition(":")[0]) == (Fidelity.TEXT, "redacted")
        assert gateway.client.stats()["redacted"] == {"email": 2}


def test_in_train_nothing_is_taken_out_unless_asked(engine, start):
    for redact, expected in [("record", Fidelity.EXACT), ("all", Fidelity.TEXT), ("off", Fidelity.EXACT)]:
        with start(mode="train", redact=redact) as gateway:
            gateway.chat(gateway.open(redact), messages=[{"role": "user", "content": EMAIL}])
            call = gateway.call(redact)
            assert call.fidelity is expected
            assert (EMAIL.encode() in call.request) is (expected is Fidelity.EXACT)
            if expected is Fidelity.TEXT:
                assert call.prompt_ids is None
                assert [len(choice.token_ids) + len(choice.logprobs) for choice in call.choices] == [0]


def test_ids_that_an_agent_asked_for_itself_go_too(engine, start):
    with start(mode="record") as gateway:
        key = gateway.open(mode=Mode.RECORD)
        messages = [{"role": "user", "content": EMAIL}]
        got = gateway.chat(key, messages=messages, return_token_ids=True, logprobs=True)
        assert got.json["choices"][0]["token_ids"]
        call = gateway.call()
        assert call.prompt_ids is None
        stored = json.loads(call.response)  # it held nothing to take out, but the prompt's ids spell the request again
        assert stored["choices"][0]["message"]["content"] == Sampled().text
        assert (
            stored["prompt_token_ids"] is stored["choices"][0]["token_ids"] is stored["choices"][0]["logprobs"] is None
        )


PROVIDER_KEY = "sk-" + "live9" * 8
SHORT_KEY = "correct-horse"


@pytest.mark.parametrize("mode", ["passthrough", "record"])
@pytest.mark.parametrize("key", [PROVIDER_KEY, SHORT_KEY])
def test_provider_keys_pass_upstream_and_are_never_stored_or_logged(engine, start, tmp_path, caplog, mode, key):
    caplog.set_level(logging.DEBUG)
    echo = {"error": {"message": f"Incorrect API key provided: {key}.", "code": "invalid_api_key"}}
    headers = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"api-key": key}]
    with start(mode=mode) as gateway:
        for one in headers:
            engine.answers += [json_answer(echo, status=401), stream(echo), json_answer({"choices": [], "x": key})]
            for path in (CHAT, CHAT, CHAT, "/v1/messages", "/v1/responses"):
                body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "input": f"I am {key}", "user": key}
                gateway.post(path, body, one)
            gateway.post(CHAT, b"{bad", one)
        assert len(engine.received) == 3 * 5 + (3 if mode == "passthrough" else 0)
        assert all(key in repr(received.headers) for received in engine.received)
        assert (len(gateway.store.calls_after(0)) > 0) is (mode == "record")
        for call in gateway.store.calls_after(0):
            assert key not in repr(call)
        assert key not in json.dumps(gateway.client.stats())
    files = list(tmp_path.glob("store.sqlite3*"))
    assert files
    for file in files:
        assert key.encode() not in file.read_bytes()
    assert key not in caplog.text
