"""Several replicas: rollouts keep to one, move when it dies, and everybody is told when there is none."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import anthropic
import openai
import pytest

from fakes.engine import Answer, ScriptedEngine, chunk, json_answer, raw_stream, stream
from fakes.engine_process import EngineProcess
from fakes.gateway import CHAT, MESSAGES, wait_for
from outrider.errors import ConfigError
from outrider.types import CallState, Fidelity, Mode

ASK = {"model": "m", "messages": MESSAGES}


@pytest.fixture
def engines():
    """Three of them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ScriptedEngine()) for _ in range(3)]


@pytest.fixture
def gateway(start, engines):
    with start(mode="train", **options(engines)) as gateway:
        yield gateway


def options(engines, **more):
    return {"upstream": tuple(engine.base_url for engine in engines), "health_interval_s": 0.05, **more}


def states(gateway):
    return {state["replica"]: state for state in gateway.replica_states()}


def by_url(engines, url):
    return next(engine for engine in engines if engine.base_url == url)


def wait_up(gateway, engine, up=True):
    wait_for(lambda: states(gateway)[engine.base_url]["up"] is up)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_each_rollout_keeps_to_one_replica(engines, gateway):
    for number in range(12):
        key = gateway.open(f"attempt-{number}")
        for _ in range(4):
            assert gateway.chat(key).status == 200
        calls = gateway.recorded(4, f"attempt-{number}")
        assert len({call.replica for call in calls}) == 1
        assert all(call.fidelity is Fidelity.EXACT and call.retries == () for call in calls)
    served = {engine.base_url: len(engine.received) for engine in engines}
    assert all(count % 4 == 0 for count in served.values())
    assert sum(count > 0 for count in served.values()) >= 2
    found = states(gateway)
    assert {url: state["calls"] for url, state in found.items()} == served
    assert sum(state["pinned"] for state in found.values()) == 12
    assert {state["in_flight"] for state in found.values()} == {0}


def test_a_trajectory_without_a_key_keeps_to_one_replica_too(start, engines):
    with start(mode="record", **options(engines)) as gateway:
        for _ in range(6):
            assert gateway.post(CHAT, ASK, {"x-outrider-trajectory": "t1"}).status == 200
        assert len({call.replica for call in gateway.recorded(6, "trajectory:t1")}) == 1
        for number in range(12):
            talk = {"model": "m", "messages": [{"role": "user", "content": f"talk {number}"}]}
            gateway.post(CHAT, talk)
            gateway.post(CHAT, talk | {"messages": [*talk["messages"], {"role": "user", "content": "on"}]})
        calls = [call for call in gateway.store.calls_after(0) if call.attempt_id != "trajectory:t1"]
        used = {}
        for call in calls:
            used.setdefault(call.attempt_id, set()).add(call.replica)
        assert {len(replicas) for replicas in used.values()} == {1}
        assert len(set().union(*used.values())) >= 2


def test_what_passes_through_is_spread_or_keeps_to_the_trajectory_it_names(start, engines):
    with start(mode="passthrough", **options(engines)) as gateway:
        for _ in range(6):
            assert gateway.post(CHAT, ASK).status == 200
        assert [len(engine.received) for engine in engines] == [2, 2, 2]
        for _ in range(6):
            gateway.post(CHAT, ASK, {"x-outrider-trajectory": "t1"})
        assert sorted(len(engine.received) for engine in engines) == [2, 2, 8]


def test_many_rollouts_at_once_are_spread_evenly(engines, gateway):
    gate = threading.Event()
    for engine in engines:
        engine.answers.extend(Answer(chunks=[b"", b"x"], gate=gate) for _ in range(30))
    keys = [gateway.open(f"attempt-{number}") for number in range(30)]
    with ThreadPoolExecutor(30) as pool:
        futures = [pool.submit(gateway.chat, key) for key in keys]
        wait_for(lambda: sum(len(engine.received) for engine in engines) == 30)
        assert max(len(engine.received) for engine in engines) <= 13  # 1.25 times 10, rounded up
        gate.set()
        for future in futures:
            future.result(60)


@pytest.mark.parametrize("upstream", [(), "", "http://a,http://a", ("http://a", "http://b/v1", "http://b/")])
def test_no_replica_or_one_twice_is_refused(start, upstream):
    with pytest.raises(ConfigError, match=r"upstream: .*once"):
        start(upstream=upstream)


# -- health ------------------------------------------------------------------------------------------------------------


def test_the_log_tells_that_a_replica_is_down_and_that_it_is_up_again(start, engines, caplog):
    with start(mode="train", **options(engines)) as gateway:
        name = engines[1].base_url
        gateway.chat(gateway.open())  # from now on they are looked at
        engines[1].stop()
        wait_up(gateway, engines[1], up=False)
        engines[1].start()
        wait_up(gateway, engines[1])
    told = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert [line.partition(": ")[0] for line in told] == [f"replica {name} is down", f"replica {name} is up again"]


def test_a_rollout_moves_when_its_replica_dies_and_does_not_go_back(start, engines):
    with start(mode="train", upstream_retries=2, **options(engines)) as gateway:
        key = gateway.open()
        gateway.chat(key)
        home = gateway.call().replica
        by_url(engines, home).stop()
        assert gateway.chat(key).status == 200  # the agent notices nothing
        wait_up(gateway, by_url(engines, home), up=False)
        gateway.chat(key)
        moved_to = gateway.recorded(3)[-1].replica
        assert moved_to != home
        by_url(engines, home).start()
        wait_up(gateway, by_url(engines, home))
        for _ in range(3):
            assert gateway.chat(key).status == 200
        assert [call.replica for call in gateway.recorded(6)][2:] == [moved_to] * 4
        assert {call.state for call in gateway.recorded(6)} == {CallState.COMPLETE}
        found = states(gateway)
        assert (found[home]["times_down"], found[home]["moved"], found[moved_to]["moved"]) == (1, 1, 0)
        assert found[home]["retries"] >= 1


def test_a_replica_that_says_it_is_ill_gets_no_calls_until_it_is_well(engines, gateway):
    ill = engines[0]
    gateway.chat(gateway.open("first"))
    ill.healthy = False
    wait_up(gateway, ill, up=False)
    assert gateway._app._replicas.why() == f"{ill.base_url}: /health answers 503"
    before = len(ill.received)
    for number in range(12):
        assert gateway.chat(gateway.open(f"attempt-{number}")).status == 200
    assert len(ill.received) == before
    ill.healthy = True
    wait_up(gateway, ill)
    for number in range(12, 40):
        gateway.chat(gateway.open(f"attempt-{number}"))
    assert len(ill.received) > before


def test_a_killed_process_costs_a_call_that_has_not_begun_nothing(start):
    with (
        EngineProcess(delay_s=20) as slow,
        ScriptedEngine() as other,
        start(mode="train", upstream_retries=2, **options([slow, other])) as gateway,
    ):
        pins = [f"attempt-{number}" for number in range(40)]
        homes = {}
        for pin in pins:  # some of them live on the process
            raw = gateway.open_socket(f"/s/{gateway.open(pin)}{CHAT}", ASK)
            wait_for(lambda pin=pin: len(gateway.store.calls(pin)) or states(gateway)[slow.base_url]["in_flight"])
            homes[pin] = not gateway.store.calls(pin)
            if homes[pin]:
                break
            raw.close()
        assert homes[pin], "no rollout went to the process"
        slow.kill()
        answer = raw.recv(65536)
        raw.close()
        assert answer.startswith(b"HTTP/1.1 200")
        (call,) = gateway.recorded(1, pin)
        assert (call.state, call.fidelity, call.replica) == (CallState.COMPLETE, Fidelity.EXACT, other.base_url)
        (retry,) = call.retries
        assert (retry.replica, retry.status) == (slow.base_url, 0)
        assert "closed the connection" in retry.error


def test_one_upstream_is_left_alone_while_it_is_up(engine, start):
    with start(mode="train", health_interval_s=0.02) as gateway:
        key = gateway.open()
        for _ in range(5):
            gateway.chat(key)
        assert engine.probes == 0
        engine.stop()
        assert [gateway.chat(key).status for _ in range(2)] == [502, 503]
        got = gateway.chat(key)
        assert got.status == 503
        assert f"no replica is up ({engine.base_url}: upstream_unreachable)" in got.json["error"]["message"]
        engine.start()
        wait_up(gateway, engine)
        assert gateway.chat(key).status == 200
        probes = engine.probes
        assert probes >= 1
        gateway.chat(key)
        assert engine.probes == probes


def test_an_upstream_without_a_health_route_is_up_if_it_answers(engine, start):
    with start(mode="train", health_interval_s=0.02, health_path="/nothing/here") as gateway:
        key = gateway.open()
        engine.stop()
        assert [gateway.chat(key).status for _ in range(2)] == [502, 503]
        engine.start()
        wait_up(gateway, engine)
        assert gateway.chat(key).status == 200


# -- nobody is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_with_every_replica_down_each_protocol_is_told_at_once_and_they_are_found_again(start, engines, streamed):
    with start(mode="train", health_rise=3, **options(engines)) as gateway:
        url = f"{gateway.base_url}/s/{gateway.open()}"
        for engine in engines:
            engine.stop()
        gateway.chat(gateway.open("first"))
        for engine in engines:
            wait_up(gateway, engine, up=False)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as gpt:
            for ask in (
                lambda: gpt.chat.completions.create(model="m", messages=MESSAGES, stream=streamed),
                lambda: gpt.completions.create(model="m", prompt="Hi", stream=streamed),
                lambda: gpt.responses.create(model="m", input="Hi", stream=streamed),
            ):
                with pytest.raises(openai.InternalServerError, match="no replica is up") as caught:
                    ask()
                assert caught.value.status_code == 503
                assert caught.value.code == "upstream_unavailable"
                assert caught.value.response.headers["retry-after"] == "1"
        with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as claude:
            with pytest.raises(anthropic.InternalServerError, match="no replica is up") as caught:
                claude.messages.create(model="m", max_tokens=9, messages=MESSAGES, stream=streamed)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "1"
        for call in gateway.recorded(4):
            assert (call.state, call.status) == (CallState.FAILED, 503)
            assert call.error.startswith("upstream_unavailable: ")
            assert time.time() - 300 < call.started_at <= time.time()
            assert 0 <= call.duration_s < 300
            assert call.fidelity is not Fidelity.EXACT
        assert gateway.client.health()["in_flight"] == 0
        engines[1].start()
        wait_up(gateway, engines[1])
        assert gateway.chat(gateway.open("later"), stream=streamed).status == 200
        assert gateway.call("later").replica == engines[1].base_url


def test_the_sdks_own_retries_live_through_it(start, engine):
    with start(mode="train", health_interval_s=0.05) as gateway:
        key = gateway.open()
        engine.stop()
        assert [gateway.chat(key).status for _ in range(3)] == [502, 503, 503]

        def wake_once_one_more_is_refused():
            wait_for(lambda: len(gateway.store.calls("attempt-1")) > 3)
            engine.start()

        with ThreadPoolExecutor(1) as pool:
            waking = pool.submit(wake_once_one_more_is_refused)
            with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="k", max_retries=12) as client:
                assert client.chat.completions.create(**ASK).choices[0].finish_reason == "stop"
            waking.result(60)


def test_in_passthrough_another_replica_takes_what_one_never_got(start, engines):
    with start(mode="passthrough", upstream_retries=2, **options(engines)) as gateway:
        engines[0].stop()
        engines[1].stop()
        for _ in range(6):
            assert gateway.post(CHAT, ASK).status == 200
        assert len(engines[2].received) == 6


def test_a_client_that_leaves_says_nothing_about_the_replica(start, engines):
    with start(mode="train", **options(engines[:2])) as gateway:
        for number in range(4):
            for engine in engines[:2]:
                engine.answers.append(Answer(delay_s=60))
            raw = gateway.open_socket(f"/s/{gateway.open(f'attempt-{number}')}{CHAT}", ASK)
            wait_for(lambda number=number: sum(len(engine.received) for engine in engines[:2]) == number + 1)
            raw.close()
            assert gateway.call(f"attempt-{number}").state is CallState.CANCELLED
        assert Counter(state["up"] for state in states(gateway).values()) == {True: 2}
        assert {state["failures"] for state in states(gateway).values()} == {0}


def test_an_error_that_is_an_answer_leaves_a_replica_up(start, engines):
    with start(mode="train", **options(engines[:2])) as gateway:
        key = gateway.open()
        for engine in engines[:2]:
            engine.answers.extend(json_answer({"error": {"message": "no"}}, status=500) for _ in range(5))
        assert {gateway.chat(key).status for _ in range(5)} == {500}
        assert all(state["up"] for state in states(gateway).values())
        assert len({call.replica for call in gateway.recorded(5)}) == 1
        assert gateway.post(f"/s/{gateway.open('a', mode=Mode.RECORD)}{CHAT}", ASK).status in (200, 500)


def test_replicas_that_come_and_go_lose_and_double_no_call(start, engines):
    """Sixteen agents, plain and streamed, while replicas die, fall ill and answer badly."""
    chance = random.Random(4)
    bad = (
        lambda: Answer(status=503),
        lambda: Answer(end="reset"),
        lambda: Answer(headers={"content-length": "999"}, chunks=[b'{"choices"'], end="reset"),
        lambda: stream(chunk({"content": "a"}), done=False, end="reset"),
        lambda: raw_stream(b""),
        lambda: json_answer({"error": {"message": "no"}}, status=429),
    )
    with start(mode="train", upstream_retries=3, **options(engines)) as gateway:
        keys = {f"attempt-{number}": gateway.open(f"attempt-{number}") for number in range(16)}
        got = {}

        def agent(pin):
            for number in range(12):
                name = f"{pin}.{number}"
                got[name] = gateway.chat(keys[pin], user=name, stream=number % 2 == 1)

        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(agent, pin) for pin in keys]
            while not all(future.done() for future in futures):
                engine = chance.choice(engines)
                engine.answers.extend(chance.choice(bad)() for _ in range(2))
                engine.stop()
                time.sleep(0.05)
                engine.start()
                time.sleep(0.05)
            for future in futures:
                future.result()
        calls = {json.loads(call.request)["user"]: call for call in gateway.store.calls_after(0, 10_000)}
        assert len(gateway.store.calls_after(0, 10_000)) == len(calls) == len(got) == 16 * 12
        for name, answer in got.items():
            clean = answer.status == 200 and (b'"stop"' in answer.body) and b'"error"' not in answer.body
            assert clean == (calls[name].state is CallState.COMPLETE), name
            assert clean == (calls[name].fidelity is Fidelity.EXACT), name
        assert sum(call.state is CallState.COMPLETE for call in calls.values()) > 16 * 6
        assert any(call.retries for call in calls.values())
        wait_for(lambda: {state["in_flight"] for state in states(gateway).values()} == {0})
        wait_for(lambda: gateway.client.health()["in_flight"] == 0)
