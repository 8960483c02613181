"""Every branch of the calculator's reward, and the ways a policy may try to get round it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.records import make_call
from outrider.errors import RewardError
from outrider.outcome import scored
from outrider.types import Attempt, CallState, Episode, Task

ADD = {"tool": "add", "a": 5, "b": 12, "answer": 17}
SUBTRACT = {"tool": "subtract", "a": 58, "b": 9, "answer": 49}
MULTIPLY = {"tool": "multiply", "a": 99, "b": 12, "answer": 1188}


def recorded(id, reply, last="x", **fields):
    request = {"messages": [{"role": "user", "content": last}]}
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]}
    return make_call(id, request=json.dumps(request).encode(), response=json.dumps(response).encode(), **fields)


@pytest.fixture
def judge(reward, agent):
    """Score an episode in which the model wrote `first` and `final`, as the agent would have run it."""

    def judge(task, first, final, calls=None):
        if calls is None:
            calls = (recorded("c1", first), recorded("c2", final, last=agent.run_tool(first)))
        attempt = Attempt(id="r.a1", rollout_id="r", number=1, stdout_tail=f"{final}\n")
        return reward.score(Episode(task=Task(id="t", fields=task), attempt=attempt, calls=tuple(calls)))

    return judge


def call(tool, a, b):
    return json.dumps({"tool": tool, "a": a, "b": b})


@pytest.mark.parametrize(
    ("task", "first", "final", "value", "reason"),
    [
        (ADD, call("add", 5, 12), "The answer is 17.", 1.0, "Right call, right answer."),
        (ADD, call("add", 12, 5), "17", 1.0, "Right call"),
        (ADD, '\n {"b": 12,\n"a": 5, "tool": "add"} ', "It is 5 + 12 = 17", 1.0, "Right call"),
        (MULTIPLY, call("multiply", 12, 99), "12 times 99 is 1,188.", 1.0, "Right call"),
        (SUBTRACT, call("subtract", 58, 9), "49 are left", 1.0, "Right call"),
        # the right call, another answer
        (ADD, call("add", 5, 12), "The answer is 18.", 0.5, "The final answer is not 17: The answer is 18."),
        (ADD, call("add", 5, 12), "", 0.5, "The final answer is not 17"),
        (ADD, call("add", 5, 12), "17 plus or minus 5", 0.5, "The final answer is not 17"),
        (ADD, call("add", 5, 12), "-17", 0.5, "The final answer is not 17"),
        (ADD, call("add", 5, 12), "17.5", 0.5, "The final answer is not 17"),
        (ADD, call("add", 5, 12), "117", 0.5, "The final answer is not 17"),
        # the right tool or the right arguments alone
        (SUBTRACT, call("subtract", 9, 58), "49", 0.3, "The arguments are [9, 58]; [58, 9] were needed."),
        (ADD, call("add", 5, 13), "17", 0.3, "The arguments are [5, 13]"),
        (ADD, call("multiply", 12, 5), "17", 0.3, "The tool is multiply; add was needed."),
        (ADD, call("subtract", 5, 12), "17", 0.3, "The tool is subtract; add was needed."),
        (ADD, call("subtract", 12, 5), "17", 0.1, "The tool is subtract; add was needed."),
        (ADD, call("multiply", 1, 17), "17", 0.1, "The tool is multiply; add was needed."),
        # no call at all
        (ADD, "The answer is 17.", "The answer is 17.", 0.0, "The first reply is no JSON tool call: The answer is 17."),
        (ADD, "17", "17", 0.0, "no JSON tool call"),
        (ADD, "", "17", 0.0, "no JSON tool call"),
        (ADD, call("add", 5, 12) + " 17", "17", 0.0, "no JSON tool call"),
        (ADD, "```json\n" + call("add", 5, 12) + "\n```", "17", 0.0, "no JSON tool call"),
        (ADD, f"[{call('add', 5, 12)}]", "17", 0.0, "no JSON tool call"),
        (ADD, call("divide", 5, 12), "17", 0.0, "no JSON tool call"),
        (ADD, call(["add"], 5, 12), "17", 0.0, "no JSON tool call"),
        (ADD, call("add", "5", "12"), "17", 0.0, "no JSON tool call"),
        (ADD, call("add", 5.0, 12.0), "17", 0.0, "no JSON tool call"),
        (ADD, call("add", True, 12), "17", 0.0, "no JSON tool call"),
        (ADD, '{"tool": "add", "a": 5}', "17", 0.0, "no JSON tool call"),
        (ADD, '{"tool": "add", "a": 5, "b": 12, "c": 0}', "17", 0.0, "no JSON tool call"),
        (ADD, '{"tool": "add", "a": 5, "b": NaN}', "17", 0.0, "no JSON tool call"),
        (ADD, "[" * 100_000, "17", 0.0, "no JSON tool call"),
        (ADD, '{"tool": "add", "a": 5, "b": ' + "9" * 5000 + "}", "17", 0.0, "no JSON tool call"),
    ],
)
def test_branches(judge, task, first, final, value, reason):
    score = judge(task, first, final)
    assert score.value == value
    assert reason in score.reason
    assert math.isclose(sum(score.parts.values()), value)
    assert list(score.parts) == ["format", "tool", "arguments", "answer"]


def test_listing_numbers_is_no_answer(judge):
    everything = " ".join(str(n) for n in range(18))
    assert judge(ADD, call("add", 5, 12), everything).value == 0.5


def test_the_result_must_have_been_shown(judge):
    """A harness that ended early, or an answer that did not follow from the tool."""
    right = call("add", 5, 12)
    assert judge(ADD, right, "17", calls=[recorded("c1", right)]).value == 0.5
    other = judge(ADD, right, "17", calls=[recorded("c1", right), recorded("c2", "17", last="Result: 18")])
    assert (other.value, other.reason) == (0.5, "The model was not shown the result.")


def test_a_retried_call_counts_once(judge):
    right = call("add", 5, 12)
    failed = make_call("c0", state=CallState.FAILED, status=503, response=b"busy")
    calls = [failed, recorded("c1", right), recorded("c2", "17", last="Result: 17")]
    assert judge(ADD, right, "17", calls=calls).value == 1.0


@pytest.mark.parametrize(
    "calls",
    [
        (),
        (make_call("c1", state=CallState.FAILED, status=502, response=b"bad gateway"),),
        (make_call("c1", response=b"event stream"),),
        (make_call("c1", response=b'{"choices": []}'),),
    ],
)
def test_R09_what_cannot_be_judged_is_no_zero(reward, calls):
    attempt = Attempt(id="r.a1", rollout_id="r", number=1, stdout_tail="17\n")
    episode = Episode(task=Task(id="t", fields=ADD), attempt=attempt, calls=calls)
    with pytest.raises(RewardError):
        scored(reward.score, "reward:score", episode)


@given(
    first=st.text() | st.from_regex(r'\{"tool": "add", "a": -?\d+, "b": \d+\}', fullmatch=True),
    final=st.text(),
    null=st.booleans(),
)
def test_whatever_the_model_writes_gets_a_number(reward, agent, first, final, null):
    calls = (recorded("c1", None if null else first), recorded("c2", final, last=agent.run_tool(first)))
    attempt = Attempt(id="r.a1", rollout_id="r", number=1, stdout_tail=final)
    score = scored(reward.score, "reward:score", Episode(task=Task(id="t", fields=ADD), attempt=attempt, calls=calls))
    assert 0 <= score.value <= 1


def test_full_reward_is_exactly_one(reward):
    """`reward.success` is 1.0; a sum of rounded parts must not fall short of it."""
    assert round(sum(reward.WEIGHTS.values()), 6) == 1.0
