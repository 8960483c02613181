"""Auxiliary calls, in the shapes that real harnesses send them (structure as recorded, texts made up)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fakes.calls import call, cut, trained
from outrider.config import LeaveOutRule
from outrider.trajectory import build
from outrider.trajectory.leave_out import OTHER_MODEL, left_out
from outrider.trajectory.requests import Asked, asked

SHAPES = Path(__file__).parents[1] / "dialects" / "data"
SHARED = Path(__file__).parents[3] / "shared" / "recordings"  # the full recordings, where they lie beside the checkout
FILES = [SHAPES / "claude_code.jsonl", SHAPES / "codex.jsonl"]
# The SDKs' own are no agents: their calls have nothing in common.
FILES += [file for file in sorted(SHARED.glob("*.jsonl")) if not file.stem.startswith(("openai-sdk", "anthropic-sdk"))]
TOOLS = [{"name": "Bash", "input_schema": {"type": "object"}}]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.abc; cc_entrypoint=sdk-cli;"}
TITLE_SCHEMA = {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}


def claude(content, tools=TOOLS, **more):
    return {
        "model": "claude-opus-4-8",
        "system": [BILLING, {"type": "text", "text": "You are an interactive agent."}],
        "messages": content,
        "tools": tools,
        "max_tokens": 64000,
        "stream": True,
    } | more


# Claude Code: a title in a schema without tools, a probe of the quota, the work, and a compaction without tools.
CLAUDE = {
    "title": claude(
        [{"role": "user", "content": [{"type": "text", "text": "run echo hi"}]}],
        tools=[],
        output_config={"effort": "high", "format": TITLE_SCHEMA},
    ),
    "quota": claude([{"role": "user", "content": "quota"}], tools=[], max_tokens=1, model="claude-haiku-4-5"),
    "work 1": claude([{"role": "user", "content": "run echo hi"}, {"role": "system", "content": "900 tokens left"}]),
    "work 2": claude(
        [
            {"role": "user", "content": "run echo hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "hi"}]},
        ],
        output_config={"effort": "high"},
    ),
    "compaction": claude(
        [
            {"role": "user", "content": "run echo hi"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "Summarise the conversation."},
        ],
        tools=[],
    ),
}
# opencode: a title by another model, in the chat and the messages protocol, and by the same model where there is one.
OPENCODE = {
    "title": {
        "model": "gpt-5.4-nano",
        "input": [
            {"role": "developer", "content": "You are a title generator. You output only a title."},
            {"role": "user", "content": [{"type": "input_text", "text": "Generate a title for this conversation:\n"}]},
            {"role": "user", "content": [{"type": "input_text", "text": '"run echo hi"'}]},
        ],
    },
    "work": {"model": "gpt-5", "input": [{"role": "user", "content": "run echo hi"}], "tools": TOOLS},
    "title by one model": {
        "model": "gpt-5",
        "max_tokens": 32000,
        "messages": [
            {"role": "system", "content": "You are a title generator. You output only a title."},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            {"role": "user", "content": '"run echo hi"'},
        ],
    },
}
# Codex with its default model has no top-level tools: they are in the input.
CODEX = {
    "work 1": {
        "model": "gpt-6.2-sol",
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "run echo hi"}]},
        ],
        "text": {"verbosity": "low"},
    },
    "memory": {"model": "gpt-6.2-sol", "input": "Summarise this session.", "max_output_tokens": 100},
}
# AutoGen answers from a tool's result in a call without tools: that one is work.
AUTOGEN = {
    "work 1": {"model": "gpt-4o", "messages": [{"role": "user", "content": "run echo hi"}], "tools": TOOLS},
    "work 2": {
        "model": "gpt-4o",
        "messages": [
            {"role": "user", "content": "run echo hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]},
            {"role": "tool", "tool_call_id": "c", "content": "hi"},
        ],
    },
}


def recorded(bodies, dialect="anthropic_messages"):
    return [
        call(
            [1, 10 + i],
            [20 + i],
            seq=i,
            id=name,
            model=body.get("model", ""),
            dialect=dialect,
            request=json.dumps(body).encode(),
        )
        for i, (name, body) in enumerate(bodies.items())
    ]


def rule(**conditions):
    return LeaveOutRule(name="aux", **conditions)


@pytest.mark.parametrize(
    ("bodies", "conditions", "expected"),
    [
        (CLAUDE, {"json_schema": True}, ["title"]),
        (CLAUDE, {"max_tokens": 1}, ["quota"]),
        (CLAUDE, {"no_tools": True}, ["title", "quota", "compaction"]),
        (CLAUDE, {"no_tools": True, "no_history": True}, ["title", "quota"]),
        (CLAUDE, {"user": r"^quota$"}, ["quota"]),
        (CLAUDE, {"model": "*-haiku-*"}, ["quota"]),
        (
            CLAUDE,
            {"system": "interactive agent", "no_tools": True, "max_tokens": 64000},
            ["title", "quota", "compaction"],
        ),
        (CLAUDE, {"dialect": "openai_*"}, []),
        (OPENCODE, {"system": "(?i)title generator"}, ["title", "title by one model"]),
        (OPENCODE, {"user": "^Generate a title"}, ["title", "title by one model"]),
        (OPENCODE, {"model": "*-nano"}, ["title"]),
        (OPENCODE, {"no_tools": True}, ["title", "title by one model"]),
        (AUTOGEN, {"no_tools": True}, ["work 2"]),
        (AUTOGEN, {"no_tools": True, "no_history": True}, []),
        (CODEX, {"no_tools": True}, ["memory"]),
        (CODEX, {"max_tokens": 100}, ["memory"]),
    ],
)
def test_rules_find_the_auxiliary_calls_of_real_harnesses(bodies, conditions, expected):
    assert left_out(recorded(bodies), [rule(**conditions)]) == dict.fromkeys(expected, "rule: aux")


# What the rule of docs/trajectories.md finds in recorded runs: titles, and nothing of the work.
AUXILIARY = {
    "claude": [0],
    "claude_code": [0],
    "opencode": [0],
    "opencode-anthropic": [0],
    "opencode-env": [0],
    "opencode-env.odd": [0],
    "opencode.503x2": [0, 2],  # the title is tried again
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_call_without_tools_and_history_is_auxiliary_in_every_recorded_agent(file):
    bodies = [json.loads(line)["body"] for line in file.read_text().splitlines()]
    calls = recorded({f"c{i}": body for i, body in enumerate(body for body in bodies if isinstance(body, dict))})
    found = left_out(calls, [rule(no_tools=True, no_history=True)])
    assert list(found) == [f"c{i}" for i in AUXILIARY.get(file.stem, [])]


def test_no_tools_says_nothing_where_no_call_has_any():
    assert left_out(recorded({"title": CLAUDE["title"], "quota": CLAUDE["quota"]}), [rule(no_tools=True)]) == {}


def test_the_first_rule_that_fits_gives_the_reason():
    rules = [LeaveOutRule(name="probe", max_tokens=1), LeaveOutRule(name="no tools", no_tools=True)]
    assert left_out(recorded(CLAUDE), rules) == {
        "title": "rule: no tools",
        "quota": "rule: probe",
        "compaction": "rule: no tools",
    }


def test_left_out_calls_are_counted_by_rule_and_the_rest_is_trained():
    calls = recorded(CLAUDE)
    samples = cut(build(calls, left_out(calls, [rule(no_tools=True, no_history=True)])))
    assert [trained(row) for row in samples.samples] == [[22], [23], [24]]
    assert samples.excluded == Counter({"rule: aux": 2})
    assert samples.excluded_tokens == Counter({"rule: aux": 2})


def test_several_policies_in_one_rollout_are_told_apart_by_the_model_asked_for():
    planner = call([1, 10], [20, 2], seq=1, model="policy-planner")
    critic = call([1, 10, 20, 2, 11], [21, 2], seq=2, model="critic")  # goes on from the planner's answer
    coder = call([1, 10, 20, 2, 11, 21, 2, 12], [22, 2], seq=3, model="policy-coder")
    calls = [planner, critic, coder]
    both = cut(build(calls, left_out(calls, models=["policy-*"])))
    assert [trained(row) for row in both.samples] == [[20, 2, 22, 2]]  # what the critic said is context
    assert both.excluded == Counter({OTHER_MODEL: 1})
    one = cut(build(calls, left_out(calls, models=["*-coder"])))
    assert [trained(row) for row in one.samples] == [[22, 2]]
    assert one.excluded_tokens == Counter({OTHER_MODEL: 4})
    assert left_out(calls) == {}


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b'"text"', b'{"messages": 5}', b'{"messages": [1, null]}'])
def test_a_body_that_is_no_request_meets_no_condition(body):
    assert asked(call([1], [2], request=body)) == Asked()


def test_turns_are_counted_by_answers_not_by_items():
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1"},
        {"type": "function_call", "call_id": "c1"},
        {"type": "function_call", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c2"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "and now?"},
    ]
    assert asked(call([1], [2], request=json.dumps({"input": items}).encode())).answers == 2
