"""Replicas that are processes, behind a gateway that is one."""

from __future__ import annotations

import urllib.request

import openai

from fakes.engine_process import EngineProcess
from fakes.gateway import ADMIN_KEY, MESSAGES, wait_for
from fakes.process import GatewayProcess
from outrider.keys import hash_key, new_key
from outrider.stores.sqlite import SqliteStore
from outrider.types import CallState, Fidelity, Mode, Session

ASK = {"model": "m", "messages": MESSAGES}


def test_processes_of_their_own_one_of_them_killed_and_started_again(tmp_path):
    """Gateway and engines as they run for real, and the openai SDK without retries of its own."""
    store = SqliteStore(tmp_path / "s.sqlite3")
    keys = {f"attempt-{number}": new_key() for number in range(4)}
    for attempt_id, key in keys.items():
        store.open_session(Session(attempt_id=attempt_id, key_hash=hash_key(key), mode=Mode.TRAIN))
    with EngineProcess() as one, EngineProcess() as other:
        upstream = [one.base_url, other.base_url]
        with GatewayProcess(one, store.path, upstream=upstream, upstream_retries=2, health_interval_s=0.1) as gateway:

            def ask_all():
                for key in keys.values():
                    with openai.OpenAI(base_url=f"{gateway.base_url}/s/{key}/v1", api_key="k", max_retries=0) as client:
                        assert client.chat.completions.create(**ASK).choices[0].finish_reason == "stop"
                        assert len(list(client.chat.completions.create(**ASK, stream=True))) > 1

            ask_all()
            one.kill()
            ask_all()
            assert {store.calls(attempt_id)[-1].replica for attempt_id in keys} == {other.base_url}
            one.start()
            other.kill()
            wait_for(lambda: _is_up(gateway, one))
            ask_all()
            assert {store.calls(attempt_id)[-1].replica for attempt_id in keys} == {one.base_url}
    calls = store.calls_after(0, 1000)
    store.close()
    assert len(calls) == 4 * 2 * 3
    assert {(call.state, call.fidelity) for call in calls} == {(CallState.COMPLETE, Fidelity.EXACT)}


def _is_up(gateway, engine):
    asked = urllib.request.Request(f"{gateway.base_url}/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return f'outrider_upstream_replica_up{{replica="{engine.base_url}"}} 1' in answer.read().decode()
