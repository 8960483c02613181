"""A gateway that is killed and started again while attempts are in flight: all go on, on the SDK's own retries.

Here the SDK is given more retries than its two, since a busy machine may take longer than their 1.5 s to start a
process; `bench/reliability.py --only restart` measures with two.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from fakes.gateway import wait_for
from fakes.ports import claim
from fakes.process import GatewayProcess
from outrider import trajectory
from outrider.keys import hash_key, new_key
from outrider.stores.sqlite import SqliteStore
from outrider.types import CallState, Fidelity, Mode, Session

AGENTS = 16
TURNS = 4


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_attempts_in_flight_go_on_after_a_restart(engine, tmp_path, how):
    store = SqliteStore(tmp_path / "s.sqlite3")
    keys = [new_key() for _ in range(AGENTS)]
    for number, key in enumerate(keys):
        store.open_session(Session(attempt_id=f"attempt-{number}", key_hash=hash_key(key), mode=Mode.TRAIN))
    engine.delay_s = 0.1
    with (
        claim() as held,
        GatewayProcess(engine, tmp_path / "s.sqlite3", port=held.getsockname()[1]) as gateway,
        ThreadPoolExecutor(AGENTS) as pool,
    ):
        gateway.client.resume(3)
        agents = [pool.submit(agent, gateway.base_url, key, number) for number, key in enumerate(keys)]
        wait_for(lambda: len(engine.received) >= 2 * AGENTS)
        assert getattr(gateway, how)() in (0, None)
        gateway.start()
        answered = [name for future in agents for name in future.result(120)]
        assert gateway.client.health()["policy_version"] == 3
    assert len(answered) == AGENTS * TURNS
    for number in range(AGENTS):
        calls = store.calls(f"attempt-{number}")
        names = [json.loads(call.request)["user"] for call in calls if call.state is CallState.COMPLETE]
        assert set(names) == {f"{number}-{turn}" for turn in range(TURNS)}
        assert {call.version_start for call in calls} == {3}
        assert all((call.fidelity is Fidelity.EXACT) is (call.state is CallState.COMPLETE) for call in calls)
        trajectory.build(calls)
    store.close()


def agent(base_url, key, number):
    answered, history = [], []
    with openai.OpenAI(base_url=f"{base_url}/s/{key}/v1", api_key="any", max_retries=12) as client:
        for turn in range(TURNS):
            name = f"{number}-{turn}"
            history.append({"role": "user", "content": name})
            reply = client.chat.completions.create(model="policy", messages=history, user=name)
            history.append({"role": "assistant", "content": reply.choices[0].message.content})
            answered.append(name)
    return answered
