"""What every store does. A new store joins by one line in `STORES`."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from fakes.memory_store import MemoryStore
from fakes.records import make_call, make_choice, make_rollout
from outrider.errors import RewardError, StoreError
from outrider.stores.sqlite import SqliteStore
from outrider.types import Attempt, CallState, Failure, Fidelity, Mode, Reward, RolloutState, Session

STORES = {
    "memory": lambda request: MemoryStore(),
    "sqlite": lambda request: SqliteStore(request.getfixturevalue("tmp_path") / "store.sqlite3"),
    "postgres": lambda request: request.getfixturevalue("postgres_store"),
}


@pytest.fixture(params=STORES)
def store(request):
    store = STORES[request.param](request)
    yield store
    store.close()


def same_call(found, expected):
    """Dataclass equality does not work on arrays."""
    assert (found.prompt_ids is None) == (expected.prompt_ids is None)
    if expected.prompt_ids is not None:
        assert found.prompt_ids.dtype == np.int32
        np.testing.assert_array_equal(found.prompt_ids, expected.prompt_ids)
    assert len(found.choices) == len(expected.choices)
    for one, other in zip(found.choices, expected.choices, strict=True):
        assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
        assert one.token_ids.dtype == np.int32
        assert one.logprobs.dtype == np.float32
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    plain = {"prompt_ids": None, "choices": (), "seq": 0}
    assert replace(found, **plain) == replace(expected, **plain)


# -- calls -------------------------------------------------------------------------------------------------------------

CALLS = {
    "exact": {},
    "two choices": {
        "choices": (make_choice(0, [1], [-0.5]), make_choice(1, [2, 3, 4], [-1.0, -2.0, -3.0], "length")),
    },
    "lengths that differ": {
        "choices": (make_choice(0, [1, 2], [-0.5]), make_choice(1, [], [-1.0, -2.0], None)),
        "fidelity": Fidelity.BROKEN,
        "fidelity_reason": "lengths: choice 0",
    },
    "text": {"prompt_ids": None, "choices": (), "usage": None, "fidelity": Fidelity.TEXT},
    "empty bodies": {"request": b"", "response": b""},
    "any bytes": {"request": bytes(range(256)), "response": b"\xff" * 100_000},
    "largest id, nan": {"choices": (make_choice(0, [2**31 - 1], [math.nan]),)},
    "everything": {
        "dialect": "openai_completions",
        "model": "modèle",
        "state": CallState.FAILED,
        "status": 502,
        "streamed": True,
        "sampling": {"temperature": 0.7, "stop": ["a", "b"], "logit_bias": {"5": -1}},
        "version_start": 3,
        "version_end": 4,
        "started_at": 1764500000.125,
        "duration_s": 1.5,
        "first_token_s": 0.25,
        "error": "boom",
    },
}


@pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS.keys())
def test_a_call_comes_back_as_it_went_in(store, fields):
    call = make_call("c1", **fields)
    assert store.append_call(call).result(30) == 1
    (found,) = store.calls(call.attempt_id)
    same_call(found, call)
    assert found.seq == 1


def test_calls_of_an_attempt_are_in_order_of_commit_and_apart_from_others(store):
    for number in range(6):
        store.append_call(make_call(f"c{number}", f"attempt-{number % 2}")).result(30)
    assert [call.id for call in store.calls("attempt-0")] == ["c0", "c2", "c4"]
    assert [call.id for call in store.calls("attempt-1")] == ["c1", "c3", "c5"]
    assert store.calls("attempt-2") == []


def test_a_follower_sees_each_call_once_in_order(store):
    futures = [store.append_call(make_call(f"c{number}")) for number in range(10)]
    assert sorted(future.result(30) for future in futures) == list(range(1, 11))
    assert [call.seq for call in store.calls_after(0, limit=4)] == [1, 2, 3, 4]
    assert [call.seq for call in store.calls_after(4)] == [5, 6, 7, 8, 9, 10]
    assert store.calls_after(10) == []


def test_a_call_id_is_taken_once_and_its_neighbours_are_not_hurt(store):
    futures = [store.append_call(make_call(name)) for name in ("a", "a", "b")]
    assert futures[0].result(30) == 1
    with pytest.raises(StoreError):
        futures[1].result(30)
    assert futures[2].result(30) == 2
    assert [call.id for call in store.calls("attempt-1")] == ["a", "b"]


def test_D01_concurrent_appenders_and_followers_see_no_gap_and_no_duplicate(store):
    seen = []
    done = threading.Event()

    def follow():
        while not (done.is_set() and len(seen) == 160):
            found = store.calls_after(seen[-1] if seen else 0)
            seen.extend(call.seq for call in found)

    def append(worker):
        return [store.append_call(make_call(f"c{worker}-{number}")).result(60) for number in range(5)]

    follower = threading.Thread(target=follow)
    follower.start()
    with ThreadPoolExecutor(32) as pool:
        numbers = [seq for seqs in pool.map(append, range(32)) for seq in seqs]
    done.set()
    follower.join(60)
    assert seen == list(range(1, 161))
    assert sorted(numbers) == seen


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_rewards_are_appended_never_replaced(store):
    first = Reward(attempt_id="a", value=0.5, reason="so so", parts={"format": 1.0}, source="user", created_at=1.5)
    store.add_reward(first).result(30)
    second = replace(first, value=-2.0, parts={})
    store.add_reward(second).result(30)
    store.add_reward(replace(first, attempt_id="b")).result(30)
    assert store.rewards("a") == [first, second]


def test_a_reward_may_be_for_one_call(store):
    of_call, whole = Reward(attempt_id="a", value=0.5, call_id="c1"), Reward(attempt_id="a", value=1.0)
    store.add_reward(of_call).result(30)
    store.add_reward(whole).result(30)
    assert store.rewards("a") == [of_call, whole]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(store, value):
    with pytest.raises(RewardError):
        store.add_reward(Reward(attempt_id="a", value=value))
    assert store.rewards("a") == []


def test_a_call_is_found_by_its_id(store):
    store.append_call(make_call("c1")).result(30)
    store.append_call(make_call("c2", "b")).result(30)
    same_call(store.call("c2"), make_call("c2", "b"))
    assert store.call("nothing") is None


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_is_found_by_hash_until_it_is_sealed(store):
    session = Session(
        attempt_id="a",
        key_hash="h1",
        mode=Mode.EVAL,
        sampling={"temperature": 0},
        allow_feedback=True,
        expires_at=12.5,
    )
    store.open_session(session)
    store.open_session(replace(session, key_hash="h2"))
    store.open_session(replace(session, key_hash="h3", attempt_id="b", expires_at=None))
    assert store.session("h1") == session
    assert store.session("nothing") is None
    assert sorted(found.key_hash for found in store.sessions("a")) == ["h1", "h2"]
    assert store.sessions("nobody") == []
    store.seal("a")
    store.seal("a")
    assert store.session("h1") == replace(session, sealed=True)
    assert store.session("h2").sealed
    assert not store.session("h3").sealed


def test_a_sealed_session_cannot_be_opened_again(store):
    session = Session(attempt_id="a", key_hash="h", mode=Mode.TRAIN)
    store.open_session(session)
    store.seal("a")
    with pytest.raises(StoreError):
        store.open_session(session)
    assert store.session("h").sealed


# -- rollouts ----------------------------------------------------------------------------------------------------------


def test_rollouts_are_added_once_and_found_by_use(store):
    a = make_rollout("a", split="train", step=1, sampling={"temperature": 1.0})
    b = make_rollout("b", split="train", step=2, mode=Mode.EVAL)
    c = make_rollout("c", split="before/greedy", step=1, state=RolloutState.SUCCEEDED, reward=0.5)
    assert store.add_rollouts([]) == 0
    assert store.add_rollouts([a, b]) == 2
    assert store.add_rollouts([replace(a, step=9), c, c]) == 1
    assert store.rollout("a") == a
    assert store.rollout("x") is None
    assert store.rollouts() == [a, b, c]
    assert store.rollouts(split="train") == [a, b]
    assert store.rollouts(split="train", step=1) == [a]
    assert store.rollouts(state=RolloutState.SUCCEEDED) == [c]
    assert store.rollouts(step=0) == []


def test_a_transition_is_compare_and_set(store):
    queued = make_rollout("r")
    store.add_rollouts([queued])
    running = replace(queued, state=RolloutState.RUNNING, attempt=1)
    assert store.transition(running, expect=(RolloutState.QUEUED, 0))
    assert not store.transition(running, expect=(RolloutState.QUEUED, 0))
    assert not store.transition(running, expect=(RolloutState.RUNNING, 2))
    ended = replace(
        running, state=RolloutState.FAILED, reward=None, failure=Failure.REWARD_INVALID, reason="the reward is NaN"
    )
    assert store.transition(ended, expect=(RolloutState.RUNNING, 1))
    assert store.rollout("r") == ended
    assert not store.transition(make_rollout("unknown"), expect=(RolloutState.QUEUED, 0))
    assert store.rollouts() == [ended]


def test_of_many_that_race_for_one_transition_one_wins(store):
    queued = make_rollout("r")
    store.add_rollouts([queued])

    def claim(number):
        running = replace(queued, state=RolloutState.RUNNING, attempt=1, reason=str(number))
        return store.transition(running, expect=(RolloutState.QUEUED, 0))

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(claim, range(16)))
    assert won.count(True) == 1
    assert store.rollout("r").reason == str(won.index(True))


def test_attempts_are_put_by_id_and_listed_by_number(store):
    second = Attempt(id="a2", rollout_id="r", number=2, started_at=2.0)
    first = Attempt(id="a1", rollout_id="r", number=1, started_at=1.0)
    store.put_attempt(second)
    store.put_attempt(first)
    store.put_attempt(Attempt(id="b1", rollout_id="other", number=1))
    ended = replace(
        first,
        ended_at=3.0,
        exit_code=1,
        signal=9,
        timed_out=True,
        failure=Failure.HARNESS_TIMEOUT,
        reason="over its limit",
        stdout_tail="out\n",
        stderr_tail="err é",
    )
    store.put_attempt(ended)
    assert store.attempts("r") == [ended, second]
    assert store.attempt("a2") == second
    assert store.attempt("x") is None


def test_values_are_set_and_replaced(store):
    assert store.value("policy_version") is None
    store.set_value("policy_version", "1")
    store.set_value("policy_version", "2")
    for key in ("gateway:1", "gateway:%", "gateway", "Gateway:2"):
        store.set_value(key, key)
    assert store.values("gateway:") == {"gateway:1": "gateway:1", "gateway:%": "gateway:%"}
    assert store.values("nothing") == {}
    assert store.value("policy_version") == "2"
