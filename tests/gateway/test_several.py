"""Several gateways on one PostgreSQL behind a plain load balancer: one is killed, one ends, and agents go on."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from fakes.balancer import Balancer
from fakes.engine import ScriptedEngine, chunk, stream
from fakes.gateway import ADMIN_KEY, MESSAGES, wait_for
from fakes.postgres_server import running_postgres
from fakes.process import GatewayProcess
from outrider.gateway.client import GatewayClient
from outrider.stores.postgres import PostgresStore
from outrider.types import CallState, Fidelity

AGENTS = 12


@pytest.fixture(scope="module")
def postgres():
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(postgres):
    return postgres.url


@contextlib.contextmanager
def three(engine, postgres):
    """Gateway processes on an empty store."""
    with postgres.admin() as admin:
        admin.execute("DROP SCHEMA IF EXISTS outrider CASCADE")
    with contextlib.ExitStack() as stack:
        options = {"store": postgres.url, "mode": "train", "log_level": "off"}
        yield [stack.enter_context(GatewayProcess(engine, Path(), **options)) for _ in range(3)]


@pytest.fixture(scope="module")
def shared_engine():
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def lasting(shared_engine, postgres):
    """For tests that end none of them."""
    with three(shared_engine, postgres) as gateways:
        yield gateways


@pytest.fixture
def engine(shared_engine):
    shared_engine.forget()
    return shared_engine


@pytest.fixture
def gateways(engine, postgres):
    with three(engine, postgres) as gateways:
        yield gateways


def test_a_key_opened_at_one_holds_at_all_until_one_seals_it(lasting):
    key = lasting[0].client.open_attempt("a")["key"]
    for gateway in lasting:
        assert ask(gateway, key).status_code == 200
    lasting[2].client.seal_attempt("a")
    for gateway in lasting:
        assert ask(gateway, key).status_code == 403
    assert lasting[1].client.attempt("a")["calls"] == 3


def ask(gateway, key, **fields):
    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="-", max_retries=0) as client:
        try:
            answer = client.chat.completions.with_raw_response.create(model="policy", messages=MESSAGES, **fields)
        except openai.APIStatusError as error:
            return error.response
        return answer.http_response


def test_a_pause_and_a_version_reach_all_of_them(engine, lasting, url):
    key = lasting[0].client.open_attempt("b")["key"]
    gate = threading.Event()
    engine.answers.append(stream(chunk({"content": "a"}), chunk({}, finish_reason="stop"), gate=gate))
    with ThreadPoolExecutor(8) as pool:
        slow = pool.submit(ask, lasting[1], key)
        wait_for(lambda: len(engine.received) == 1)
        assert lasting[0].client.pause(0.5) == 1  # of another gateway
        assert [gateway.client.health()["paused"] for gateway in lasting] == [True] * 3
        pausing = pool.submit(lasting[2].client.pause, 60)
        time.sleep(0.3)
        assert not pausing.done()
        gate.set()
        assert pausing.result(60) == 0
        assert slow.result(60).status_code == 200
        held = [pool.submit(ask, gateway, key) for gateway in lasting]
        time.sleep(0.5)
        assert len(engine.received) == 1
        assert not any(one.done() for one in held)
        lasting[1].client.resume(4)
        assert [one.result(60).status_code for one in held] == [200] * 3
        wait_for(lambda: [gateway.client.health()["policy_version"] for gateway in lasting] == [4] * 3)
    store = PostgresStore(url)
    try:
        calls = store.calls("b")
    finally:
        store.close()
    assert [call.version_start for call in calls] == [None, 4, 4, 4]


class Agent(threading.Thread):
    """Calls until told to stop, with the SDK's own retries; a stream that breaks off is asked for again."""

    def __init__(self, port, key, number, stop):
        super().__init__(daemon=True)
        self.answered = []
        self.broken = 0
        self.failed = None
        self._url = f"http://127.0.0.1:{port}/s/{key}/v1"
        self._number = number
        self._stop_asking = stop

    def run(self):
        try:
            # A busy machine may take longer to end a process than the SDK's own two retries last.
            with openai.OpenAI(base_url=self._url, api_key="-", max_retries=12) as client:
                while not self._stop_asking.is_set():
                    self.ask(client, f"{self._number}-{len(self.answered)}-{self.broken}")
        except BaseException as error:
            self.failed = error
            raise

    def ask(self, client, name):
        asked = {"model": "policy", "messages": MESSAGES, "user": name}
        if self._number % 3:
            assert client.chat.completions.create(**asked).choices[0].message.content
        else:
            try:
                parts = list(client.chat.completions.create(**asked, stream=True))
            except openai.APIError:  # of its kind: the SDK retries no stream that has begun
                self.broken += 1
                return
            assert parts[-1].choices[0].finish_reason == "stop"
        self.answered.append(name)


def test_one_is_killed_and_one_ends_and_all_agents_go_on(engine, gateways, url):
    engine.delay_s = 0.05
    stop = threading.Event()
    with Balancer([gateway.port for gateway in gateways]) as balancer:
        key = GatewayClient(f"http://127.0.0.1:{balancer.port}", ADMIN_KEY).open_attempt("a")["key"]
        agents = [Agent(balancer.port, key, number, stop) for number in range(AGENTS)]
        for agent in agents:
            agent.start()

        def answered_by_all(more):
            have = [len(agent.answered) for agent in agents]
            wait_for(
                lambda: (
                    all(len(agent.answered) >= n + more for agent, n in zip(agents, have, strict=True))
                    or any(agent.failed for agent in agents)
                ),
                timeout_s=120,
            )
            assert [agent.failed for agent in agents] == [None] * AGENTS

        try:
            answered_by_all(3)
            assert min(balancer.sent.values()) > 0
            gateways[0].kill()
            answered_by_all(3)
            gateways[1].process.terminate()
            assert gateways[1].wait() == 0
            answered_by_all(3)
        finally:
            stop.set()
            for agent in agents:
                agent.join(60)
    store = PostgresStore(url)
    try:
        calls = store.calls("a")
    finally:
        store.close()
    stored = {json.loads(call.request)["user"]: call for call in calls if call.state is CallState.COMPLETE}
    for agent in agents:
        for name in agent.answered:
            assert stored[name].fidelity is Fidelity.EXACT
    assert [call.seq for call in calls] == sorted({call.seq for call in calls})


def test_a_killed_one_is_not_waited_for_long_and_a_new_one_starts_paused(engine, gateways, url, tmp_path):
    key = gateways[0].client.open_attempt("a")["key"]
    ask(gateways[0], key)
    gateways[0].kill()
    assert gateways[1].client.pause(60) == 0  # and not 1, when its time is up
    with GatewayProcess(engine, tmp_path, store=url, mode="train", pause_wait_s=0.1) as late:
        got = ask(late, key)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "paused")
        gateways[2].client.resume(2)
        wait_for(lambda: ask(late, key).status_code == 200)
        assert late.client.health()["policy_version"] == 2
