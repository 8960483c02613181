"""What others say is kept, whatever is in it: a row that cannot be written would be a call that cannot be answered."""

from __future__ import annotations

import pytest

from fakes.records import make_call, make_choice, make_rollout
from outrider.types import Attempt, Reward

ODD = "a\0b\ud800c\udfff é \U0001f600"
KEPT = "a\0b?c? é \U0001f600"


def test_odd_text_of_a_call(durable_store):
    choice = make_choice(0, [5], [-0.5], finish_reason=ODD)
    call = make_call("a", model=ODD, error=ODD, fidelity_reason=ODD, choices=(choice,), request=b"\0\xff")
    durable_store.append_call(call).result(30)
    (found,) = durable_store.calls("attempt-1")
    assert (found.model, found.error, found.fidelity_reason) == (KEPT, KEPT, KEPT)
    assert found.choices[0].finish_reason == KEPT
    assert found.request == b"\0\xff"


def test_odd_text_of_rewards_and_attempts(durable_store):
    durable_store.add_reward(Reward(attempt_id="a", value=1.0, reason=ODD, source=ODD)).result(30)
    assert durable_store.rewards("a")[0].reason == KEPT
    durable_store.put_attempt(Attempt(id="a", rollout_id="r", number=1, stdout_tail=ODD, stderr_tail=ODD, reason=ODD))
    assert durable_store.attempt("a").stdout_tail == KEPT
    durable_store.add_rollouts([make_rollout("r", reason=ODD)])
    assert durable_store.rollout("r").reason == KEPT


@pytest.mark.parametrize("sampling", [{"stop": ["\0"]}, {"seed": 2**63 - 1}, {"temperature": 1e308}, {"seed": -1}])
def test_odd_sampling(durable_store, sampling):
    durable_store.append_call(make_call("a", sampling=sampling)).result(30)
    assert durable_store.calls("attempt-1")[0].sampling == sampling
