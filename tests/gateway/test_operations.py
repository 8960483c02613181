"""What those who run a gateway see of it: metrics, readiness, a line for each call, and the call's id at the agent."""

from __future__ import annotations

import http.client
import io
import json
import logging
import threading
from concurrent.futures import Future

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.engine import Answer, chunk, json_answer, stream
from fakes.gateway import ADMIN_KEY, CHAT, COMPLETIONS, MESSAGES, wait_for
from fakes.process import GatewayProcess
from fakes.records import make_call
from outrider.errors import StoreBusy, StoreError
from outrider.gateway.telemetry.counters import Counters
from outrider.gateway.telemetry.logs import CallLog, LineHandler, LogWriter
from outrider.gateway.telemetry.note import Note
from outrider.gateway.telemetry.prometheus import Gauges, Metrics
from outrider.types import CallState, Fidelity, Mode

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
ASK = {"model": "policy", "messages": MESSAGES}


def scrape(gateway):
    """Each sample by its name and labels, as Prometheus reads it."""
    got = gateway.request("GET", "/metrics", headers=ADMIN)
    assert (got.status, got.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return read(got.body)


def read(body):
    families = list(text_string_to_metric_families(body.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def total(samples, name, **labels):
    return sum(value for key, value in samples.items() if key[0] == name and set(labels.items()) <= set(key[1:]))


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_calls_are_counted_by_what_they_were(engine, gateway):
    key = gateway.open()
    gateway.chat(key)
    gateway.chat(key, stream=True)
    gateway.post(f"/s/{key}{COMPLETIONS}", {"model": "policy", "prompt": "x"})
    gateway.post(f"/s/{key}/v1/messages", {**ASK, "max_tokens": 9})
    engine.answers.append(json_answer({"error": {"message": "no"}}, status=400))
    gateway.chat(key)
    gateway.post(f"/s/{key}{CHAT}", b"{bad")
    gateway.post(CHAT, ASK)
    engine.answers.append(stream(chunk({"content": "a"}, token_ids=[5]), chunk({}, finish_reason="stop")))
    gateway.chat(key, stream=True)
    samples = scrape(gateway)
    calls = [
        ({"dialect": "openai_chat", "mode": "train", "fidelity": "exact", "state": "complete", "status": "200"}, 2),
        ({"dialect": "openai_completions", "fidelity": "exact"}, 1),
        ({"dialect": "anthropic_messages", "fidelity": "exact"}, 1),
        ({"dialect": "openai_chat", "state": "failed", "status": "400"}, 1),
        ({"dialect": "openai_chat", "fidelity": "", "status": "400"}, 1),
        ({"dialect": "openai_chat", "mode": "", "status": "401"}, 1),
        ({"dialect": "openai_chat", "fidelity": "broken", "state": "complete"}, 1),
        ({}, 8),
    ]
    for labels, count in calls:
        assert total(samples, "outrider_calls_total", **labels) == count, labels
    assert total(samples, "outrider_call_duration_seconds_count") == 8
    assert total(samples, "outrider_call_duration_seconds_bucket", le="+Inf") == 8
    assert total(samples, "outrider_call_duration_seconds_sum") > 0
    assert total(samples, "outrider_first_token_seconds_count") == 2
    assert total(samples, "outrider_commit_seconds_count") == 6
    assert total(samples, "outrider_tokens_total", kind="completion") == 4 * 5
    assert total(samples, "outrider_refused_total", code="missing_attempt_key") == 1
    assert total(samples, "outrider_broken_total", reason="prompt ids") == 1
    assert samples[("outrider_dropped_total",)] == 0
    assert samples[("outrider_in_flight",)] == samples[("outrider_store_queue",)] == 0
    assert total(samples, "outrider_upstream_replica_up", replica=engine.base_url) == 1
    assert total(samples, "outrider_upstream_replica_calls_total") == 6
    assert samples[("process_resident_memory_bytes",)] > 1e6


def test_calls_under_way_and_the_pause_are_seen(engine, gateway):
    gate = threading.Event()
    engine.answers.append(stream(chunk({"content": "a"}), chunk({}, finish_reason="stop"), gate=gate))
    raw = gateway.open_socket(f"/s/{gateway.open()}{CHAT}", {**ASK, "stream": True})
    wait_for(lambda: scrape(gateway)[("outrider_upstream_in_flight",)] == 1)
    gateway.client.pause(0.0)
    assert scrape(gateway)[("outrider_paused",)] == 1
    gateway.client.resume(7)
    gate.set()
    wait_for(lambda: scrape(gateway)[("outrider_in_flight",)] == 0)
    assert scrape(gateway)[("outrider_policy_version",)] == 7
    raw.close()


@pytest.mark.parametrize("error", [StoreBusy("full"), StoreError("broken")])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_cannot_be_stored_is_not_recorded_and_not_dropped(engine, gateway, monkeypatch, error, streamed):
    key = gateway.open()

    def fail(call):
        if isinstance(error, StoreBusy):
            raise error
        future = Future()
        future.set_exception(error)
        return future

    monkeypatch.setattr(gateway.store, "append_call", fail)
    gateway.chat(key, stream=streamed)
    samples = scrape(gateway)
    assert total(samples, "outrider_not_recorded_total") == 1
    assert samples[("outrider_dropped_total",)] == 0


def test_an_answer_without_a_record_would_be_counted():
    metrics = Metrics()
    note = Note(dialect="openai_chat", mode="train", kept=True)
    note.end(200)
    metrics.ended(note)
    assert note.dropped
    assert note.kept
    for fields in ({"kept": False}, {"code": "store_busy"}, {"call": make_call("c")}):
        other = Note(**({"dialect": "openai_chat", "kept": True} | fields))
        other.end(200)
        assert not other.dropped


def test_breaks_are_counted_by_cause():
    counters = Counters()
    for outcome in ("continued", "opened", "broke: tools changed", "broke: tools changed", "engine: an image"):
        counters.continuation(outcome)
    counters.rewarded("final", "judge")
    counters.rewarded("feedback", "agent")
    gauges = Gauges(
        in_flight=0,
        upstream_in_flight=0,
        store_queue=3,
        paused=False,
        draining=True,
        policy_version=None,
        log_lines_lost=2,
    )
    samples = read(Metrics().render(counters.snapshot(), gauges))
    assert total(samples, "outrider_continuations_total", outcome="broke", cause="tools changed") == 2
    assert total(samples, "outrider_continuations_total", outcome="engine", cause="an image") == 1
    assert total(samples, "outrider_continuations_total", outcome="continued", cause="") == 1
    assert total(samples, "outrider_rewards_total", source="agent") == 1
    assert samples[("outrider_store_queue",)] == 3
    assert samples[("outrider_draining",)] == 1
    assert samples[("outrider_log_lines_lost_total",)] == 2
    assert not any(key[0] == "outrider_policy_version" for key in samples)


def test_labels_hold_nothing_that_an_agent_chose(engine, start):
    with start(mode="record") as gateway:
        for n in range(3):
            gateway.post(CHAT, {**ASK, "model": f'evil"\n{n}'}, {"x-outrider-trajectory": f"t{n}"})
            gateway.post(f"/v1/evil{n}", {}, {"authorization": f"Bearer evil{n}"})
        body = gateway.request("GET", "/metrics", headers=ADMIN).body
    assert b"evil" not in body
    assert b"trajectory" not in body.replace(b"trajectories", b"")


def test_metrics_open_with_a_readers_key(start):
    with start(read_key="r", trainer_key="t") as gateway:
        for key, status in [("r", 200), ("t", 200), (ADMIN_KEY, 200), ("x", 401), (gateway.open(), 401)]:
            headers = {"authorization": f"Bearer {key}"}
            assert gateway.request("GET", "/metrics", headers=headers).status == status
        assert gateway.request("GET", "/metrics").status == 401
        assert gateway.request("POST", "/metrics", b"", ADMIN).status == 405
    with start(admin_key="") as gateway:  # on loopback alone
        assert gateway.request("GET", "/metrics").status == 200


def test_retries_are_counted_by_the_status_that_caused_them(engine, start):
    with start(mode="train", upstream_retries=3, upstream_retry_s=30.0) as gateway:
        engine.answers += [Answer(status=503), Answer(status=429)]
        key = gateway.open()
        assert gateway.chat(key).status == 200
        gateway.chat(key)
        calls = gateway.recorded(2)
        samples = scrape(gateway)
    expected = [retry.status for call in calls for retry in call.retries]
    assert {503, 429} <= set(expected)
    assert total(samples, "outrider_upstream_retries_total") == len(expected)
    assert total(samples, "outrider_upstream_retries_total", status="503") == expected.count(503)


# -- health and readiness ----------------------------------------------------------------------------------------------


def ready(gateway):
    got = gateway.request("GET", "/ready")
    assert got.json["ready"] == (got.status == 200)
    return got.json["problems"]


def test_it_is_ready_while_store_and_upstream_are(engine, gateway):
    assert ready(gateway) == []
    assert gateway.store.calls_after(0) == []
    assert engine.received == []


def test_without_an_upstream_it_is_alive_and_not_ready(engine, start):
    with start(mode="train", upstream="http://127.0.0.1:9", health_fall=1) as gateway:
        key = gateway.open()
        assert gateway.chat(key).status in (502, 503)
        wait_for(lambda: ready(gateway) == ["no upstream is up"])
        assert gateway.client.health()["status"] == "ok"


def test_a_store_that_takes_no_writes_is_not_ready_and_comes_back(gateway, monkeypatch):
    written = gateway.store.set_value

    def broken(key, value):
        raise StoreError("no space left")

    monkeypatch.setattr(gateway.store, "set_value", broken)
    wait_for(lambda: ready(gateway) == ["the store takes no writes: no space left"])
    monkeypatch.setattr(gateway.store, "set_value", written)
    wait_for(lambda: ready(gateway) == [])


def test_a_store_that_hangs_is_not_ready_and_is_asked_once(gateway, monkeypatch):
    asked, gate = [], threading.Event()

    def hang(key, value):
        asked.append(key)
        gate.wait(60)

    monkeypatch.setattr(gateway.store, "set_value", hang)
    assert ready(gateway) == ["the store has not taken a write for 2 s"]
    assert gateway.client.health()["status"] == "ok"
    assert ready(gateway)
    gate.set()
    wait_for(lambda: ready(gateway) == [])
    assert len(asked) <= 2


# -- the id of a call --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_the_agent_gets_the_id_of_its_call(engine, gateway, streamed):
    key = gateway.open()
    ids = [gateway.chat(key, stream=streamed).headers["x-outrider-call"]]
    engine.answers.append(Answer(status=500))
    ids.append(gateway.chat(key, stream=streamed).headers["x-outrider-call"])
    got = gateway.post(f"/s/{key}/v1/responses", {"model": "m", "input": "x", "stream": streamed})
    ids.append(got.headers["x-outrider-call"])
    assert f"resp_{ids[-1]}".encode() in got.body
    got = gateway.post(f"/s/{key}/v1/messages", {**ASK, "max_tokens": 9, "stream": streamed})
    ids.append(got.headers["x-outrider-call"])
    assert f"msg_{ids[-1]}".encode() in got.body
    assert [call.id for call in gateway.recorded(4)] == ids


def test_what_is_passed_through_shows_no_gateway(start):
    with start(mode="passthrough") as gateway:
        assert "x-outrider-call" not in gateway.post(CHAT, ASK).headers


# -- the log -----------------------------------------------------------------------------------------------------------

SECRETS = ["sk-live-secret", "the user's words", "ork-notthisone"]


@pytest.mark.parametrize("level", ["info", "warning", "off"])
def test_a_process_tells_of_each_call_in_a_line_of_json(engine, tmp_path, level):
    words = [{"role": "user", "content": SECRETS[1]}]
    with GatewayProcess(engine, tmp_path / "s.sqlite3", mode="record", log_level=level) as gateway:
        key = gateway.client.open_attempt("a-1", mode="train")["key"]
        ids = []
        for path, body, headers in [
            (f"/s/{key}{CHAT}", {"messages": words, "model": "m"}, {}),
            (f"/s/{key}{CHAT}", {"messages": words, "stream": True}, {}),
            (CHAT, {"messages": words}, {"authorization": f"Bearer {SECRETS[0]}", "x-outrider-trajectory": "t"}),
            (f"/s/{SECRETS[2]}{CHAT}", {"messages": words}, {}),
            (f"/s/{key}{CHAT}", {"messages": SECRETS[1]}, {}),
        ]:
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            ids.append(answer.headers["x-outrider-call"])
            connection.close()
        gateway.process.terminate()
        written = gateway.process.stderr.read()
        assert gateway.wait() == 0
    for secret in [*SECRETS, key]:
        assert secret not in written
    told = [json.loads(line) for line in written.splitlines()]
    lines = [line for line in told if line["event"] == "call"]
    messages = [line["message"] for line in told if line["event"] == "message"]
    assert messages == (["POST /admin/attempts with a key of role admin"] if level == "info" else [])
    if level == "off":
        assert lines == []
        return
    bad = [(line["status"], line["code"], line["level"]) for line in lines if line["level"] == "warning"]
    assert bad == [(401, "invalid_api_key", "warning"), (400, "400", "warning")]
    if level == "info":
        assert [line["call_id"] or None for line in lines] == ids
        assert [line["attempt_id"] for line in lines] == ["a-1", "a-1", "trajectory:t", "", "a-1"]
        assert lines[1] | {"streamed": True, "fidelity": "exact", "mode": "train", "completion_tokens": 5} == lines[1]
        for line in lines[:3]:
            assert line["duration_s"] >= line["commit_s"] > 0


WRONG = {
    "upstream_503": (json_answer({"error": {"message": "secret words"}}, status=503), {}),
    "upstream_error": (json_answer({"error": {"message": "secret words"}}), {}),
    "upstream_invalid": (Answer(chunks=[b"secret words"]), {}),
    "upstream_cut": (stream(chunk({"content": "secret words"}), done=False), {"stream": True}),
}


@pytest.mark.parametrize("code", WRONG)
def test_the_log_says_in_a_word_what_went_wrong_and_quotes_nothing(engine, start, code):
    out = io.StringIO()
    writer = LogWriter(out)
    answer, fields = WRONG[code]
    with start(mode="record") as gateway:
        observers = gateway._app._operations.observers
        observers.append(CallLog(writer, level="warning", format="json"))
        engine.answers.append(answer)
        gateway.post(CHAT, {"model": "m", "messages": MESSAGES, **fields})
        wait_for(lambda: out.getvalue() != "")
    writer.close()
    assert [json.loads(line)["code"] for line in out.getvalue().splitlines()] == [code]
    assert "secret" not in out.getvalue()


def test_a_call_that_did_not_end_well_is_a_warning():
    out = io.StringIO()
    writer = LogWriter(out)
    log = CallLog(writer, level="warning", format="text")
    for status, fields in [
        (200, {}),
        (200, {"call": make_call("c1", attempt_id="a b")}),
        (200, {"call": make_call("c2", state=CallState.CANCELLED)}),
        (200, {"call": make_call("c3", fidelity=Fidelity.BROKEN, fidelity_reason="reply: secret words")}),
        (503, {"code": "paused"}),
        (0, {"code": "client_gone"}),
    ]:
        note = Note(dialect="openai_chat", mode=Mode.TRAIN, model='m "x"\n', **fields)
        note.end(status)
        log.ended(note)
    writer.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert [line.split(" ")[1:3] for line in lines] == [["warning", "call"]] * 3
    assert "state=cancelled" in lines[0]
    assert 'model="m \\"x\\"\\n"' in lines[0]
    assert "code=paused" in lines[1]
    assert "secret" not in out.getvalue()


def test_other_messages_of_ours_are_lines_too():
    out = io.StringIO()
    writer = LogWriter(out)
    logger = logging.Logger("outrider.test")
    logger.addHandler(LineHandler(writer, format="json"))
    logger.warning("odd: %s", 5)
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("failed")
    writer.close()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [("warning", "odd: 5"), ("error", "failed")]
    assert "ValueError: x" in lines[1]["traceback"]


def test_lines_that_nobody_takes_in_are_lost_and_hold_nobody_up():
    gate = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text):
            gate.wait(60)
            return super().write(text)

    writer = LogWriter(Stuck())
    for n in range(12_000):
        writer.put({"n": n})
    assert 1900 < writer.lost <= 2000
    gate.set()
    writer.close(30)
