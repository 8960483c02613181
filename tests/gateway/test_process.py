"""The gateway as a process: start, stop, kill."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import resource
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from fakes.engine import Answer, chunk, stream
from fakes.gateway import ADMIN_KEY, CHAT, MESSAGES, wait_for
from fakes.process import GatewayProcess
from outrider.errors import ConfigError, SetupError, StoreError
from outrider.gateway.app import GatewayOptions, GatewayServer
from outrider.keys import hash_key, new_key
from outrider.stores.sqlite import SqliteStore
from outrider.types import CallState, Fidelity, Mode, Session


@pytest.fixture
def store(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite3")
    yield store
    store.close()


def open_session(store, attempt_id="attempt-1"):
    key = new_key()
    store.open_session(Session(attempt_id=attempt_id, key_hash=hash_key(key), mode=Mode.TRAIN))
    return key


class Agent(threading.Thread):
    """Calls until the gateway is gone; keeps the names of the calls that were answered to the end."""

    def __init__(self, port, key, number):
        super().__init__(daemon=True)
        self.answered = []
        self._port, self._key, self._number = port, key, number

    def run(self):
        streamed = self._number % 2 == 1
        made = 0
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            while True:
                made += 1
                name = f"agent{self._number}-call{made}."
                body = {"messages": MESSAGES, "stream": streamed, "user": name}
                connection.request("POST", f"/s/{self._key}{CHAT}", json.dumps(body))
                with contextlib.closing(connection.getresponse()) as answer:
                    data = answer.read()
                assert answer.status == 200, data
                if not streamed or data.endswith(b"data: [DONE]\n\n"):
                    self.answered.append(name)


def test_a_kill_at_any_moment_loses_no_answered_call(engine, tmp_path, store):
    key = open_session(store)
    random.seed(5)
    answered = []
    for _ in range(4):
        with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
            agents = [Agent(gateway.port, key, number) for number in range(16)]
            for agent in agents:
                agent.start()
            wait_for(lambda agents=agents: sum(len(agent.answered) for agent in agents) > 30)
            time.sleep(random.random() * 0.3)
            gateway.kill()
            for agent in agents:
                agent.join(60)
            answered.append([name for agent in agents for name in agent.answered])
    names = [json.loads(call.request)["user"] for call in store.calls("attempt-1")]
    for made in answered:
        for name in made:
            names.remove(name)  # one for each answer, or this raises
    for call in store.calls("attempt-1"):
        assert call.state in (CallState.COMPLETE, CallState.CANCELLED)
        assert call.fidelity is Fidelity.EXACT or call.state is CallState.CANCELLED
    assert [call.seq for call in store.calls_after(0, 10**6)] == list(range(1, len(store.calls("attempt-1")) + 1))


def test_a_kill_leaves_nothing_of_calls_that_were_under_way_and_a_restart_goes_on(engine, tmp_path, store):
    key = open_session(store)
    begun = stream(chunk({"content": "a"}), chunk({"content": "b"}), end="hang", done=False)
    with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
        waiting = []
        for answer in (Answer(delay_s=60), begun):  # a plain one before its first byte, a stream inside
            engine.answers.append(answer)
            connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
            connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES, "stream": answer is begun}))
            waiting.append(connection)
            wait_for(lambda: len(engine.received) == len(waiting))
        assert b'"a"' in waiting[1].getresponse().readline()
        gateway.kill()
        wait_for(lambda: engine.aborted == 2)
        for connection in waiting:
            connection.close()
        gateway.start()
        assert store.calls_after(0) == []  # no half row
        status, _, answer = get(gateway, f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES}))
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert [call.state for call in store.calls("attempt-1")] == [CallState.COMPLETE]


def test_SIGTERM_lets_a_stream_end_and_then_the_process(engine, tmp_path, store):
    key = open_session(store)
    gate = threading.Event()
    engine.answers.append(stream(chunk({"content": "a"}), chunk({}, finish_reason="stop"), gate=gate))
    with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES, "stream": True}))
        answer = connection.getresponse()
        assert b'"a"' in answer.readline()
        gateway.process.terminate()
        wait_for(lambda: get(gateway, "/ready")[0] == 503)
        assert get(gateway, "/ready")[2]["problems"] == ["draining"]
        assert get(gateway, "/health")[2]["draining"] is True
        for path in (f"/s/{key}{CHAT}", "/v1/messages"):
            status, headers, body = get(gateway, path, json.dumps({"messages": MESSAGES}))
            assert (status, headers["retry-after"], headers["connection"]) == (503, "2", "close")
            assert "about to end" in body["error"]["message"]
        gate.set()
        assert answer.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert gateway.wait() == 0
    assert [call.state for call in store.calls("attempt-1")] == [CallState.COMPLETE]


def get(gateway, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("how", ["its time is up", "a second signal"])
def test_a_stream_that_does_not_end_is_cut_and_told(engine, tmp_path, store, how):
    key = open_session(store)
    engine.answers.append(stream(chunk({"content": "a"}), chunk({"content": "b"}), end="hang", done=False))
    patience = 0.2 if how == "its time is up" else 600.0
    with GatewayProcess(engine, tmp_path / "s.sqlite3", drain_timeout_s=patience) as gateway:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES, "stream": True}))
        answer = connection.getresponse()
        assert b'"a"' in answer.readline()
        gateway.process.terminate()
        if how == "a second signal":
            wait_for(lambda: get(gateway, "/ready")[0] == 503)
            gateway.process.terminate()
        with pytest.raises((http.client.HTTPException, OSError)):
            answer.read()
        connection.close()
        assert gateway.wait() == 0
    (call,) = store.calls("attempt-1")
    assert (call.state, call.status, call.replica) == (CallState.INTERRUPTED, 200, engine.base_url)
    assert call.fidelity is not Fidelity.EXACT
    assert b'"a"' in call.response


def test_it_takes_as_many_files_as_it_may(engine, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))  # what the process begins with
    try:
        with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
            assert psutil.Process(gateway.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_nothing_under_way_it_ends_at_once(engine, tmp_path):
    with GatewayProcess(engine, tmp_path / "s.sqlite3", drain_timeout_s=600.0) as gateway:
        assert gateway.terminate() == 0  # which waits for a minute at most


def test_sessions_and_version_survive_a_kill(engine, tmp_path, store):
    key = open_session(store)
    with GatewayProcess(engine, tmp_path / "s.sqlite3") as gateway:
        gateway.client.resume(3)
        gateway.kill()
        gateway.start()
        assert gateway.client.health()["policy_version"] == 3
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=30)
        connection.request("POST", f"/s/{key}{CHAT}", json.dumps({"messages": MESSAGES}))
        assert connection.getresponse().read()
        connection.close()
    assert store.calls("attempt-1")[0].version_start == 3


def test_it_ends_when_its_parent_has_gone(engine, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with GatewayProcess(engine, tmp_path / "s.sqlite3", parent_pid=parent.pid) as gateway:
        parent.kill()  # not yet waited for: a zombie counts as gone
        assert gateway.wait() == 0
        parent.wait()
        gateway.start()
        assert gateway.wait() == 0  # it had gone before we started


def options(tmp_path, **fields):
    defaults = {"upstream": "http://127.0.0.1:1", "store": f"sqlite:///{tmp_path / 's.sqlite3'}", "port": 0}
    return GatewayOptions(**(defaults | fields))


def test_a_port_in_use_is_told_by_number(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"gateway.port: .*{port}.*already in use"):
            GatewayServer(options(tmp_path, port=port))


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"host": "no.such.host.invalid", "admin_key": ADMIN_KEY}, SetupError, "gateway.host"),
        ({"host": "0.0.0.0"}, ConfigError, "admin_key.*--admin-key, OUTRIDER_ADMIN_KEY"),
        ({"host": "::"}, ConfigError, "admin_key"),
        ({"admin_key": "sha256:12"}, ConfigError, "admin_key.*64 hex"),
        ({"admin_key": "a,b", "read_key": "b"}, ConfigError, "one of them only"),
        ({"reward_min": 1.0, "reward_max": 1.0}, ConfigError, "reward_min"),
        ({"redact_patterns": ("(",)}, ConfigError, "redact_patterns.*regular expression"),
        ({"redact_patterns": ("x*",)}, ConfigError, "redact_patterns.*everywhere"),
        ({"upstream_dialects": ("openai_chad",)}, ConfigError, "upstream_dialects"),
        ({"upstream": "localhost:80"}, ConfigError, "upstream"),
        ({"store": "s.sqlite3"}, ConfigError, "store.*sqlite:///PATH"),
        ({"store": "sqlite:///"}, ConfigError, "sqlite:///PATH"),
        ({"store": "sqlit:///x"}, ConfigError, "Did you mean 'sqlite'"),
        ({"store": "sqlite:////no/such/folder/s.sqlite3"}, StoreError, "/no/such/folder/s.sqlite3"),
        ({"store_synchronous": "OFF"}, StoreError, "FULL or NORMAL"),
        ({"dialects": ("openai_chad",)}, ConfigError, "openai_chat"),
        ({"dialects": ()}, ConfigError, "dialects"),
    ],
)
def test_options_that_are_wrong_are_told_at_the_start(tmp_path, fields, error, match):
    with pytest.raises(error, match=match):
        GatewayServer(options(tmp_path, **fields))


@pytest.mark.parametrize(("unkeyed", "told"), [("auto", True), ("refuse", True), ("allow", False)])
def test_a_public_gateway_says_at_the_start_whom_it_refuses(engine, tmp_path, unkeyed, told):
    with GatewayProcess(engine, tmp_path / "s", mode="record", host="0.0.0.0", unkeyed=unkeyed) as gateway:
        gateway.process.terminate()
        rest = gateway.process.stderr.read()
        assert gateway.wait() == 0
    assert ("--unkeyed allow" in rest) is told


@pytest.mark.parametrize(
    ("mode", "told"),
    [("passthrough", "nothing is kept (--mode record"), ("record", "calls are kept"), ("eval", "need an attempt key")],
)
def test_a_gateway_says_at_the_start_what_becomes_of_calls(tmp_path, capfd, mode, told):
    server, said = GatewayServer(options(tmp_path, mode=mode)), []
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: "ready on" in (said.append(capfd.readouterr().err) or "".join(said)))
    server.stop()
    thread.join(timeout=60)
    line = "".join(said).splitlines()[0]
    assert told in line
    assert line.endswith(f"ready on {server.base_url}")


def test_the_admin_key_is_not_in_the_repr(tmp_path):
    assert "secret" not in repr(options(tmp_path, admin_key="secret"))


def test_the_gateway_imports_without_torch():
    code = "import sys; import outrider.gateway.app; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
