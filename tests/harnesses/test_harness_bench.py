"""The harness bench itself: that it can fail, and that its scripted model does what the drivers need."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harnesses.bench import Bench, Setting
from harnesses.catalog import HARNESSES, Dialect, Harness, Variant
from harnesses.drive import PROGRAMS, drive
from harnesses.engine import write_oddly
from harnesses.install import Installed
from harnesses.model import QUOTE, RESULT, Say, Use, decide
from harnesses.table import to_json, to_markdown
from outrider.types import Break, Mode

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a", "b"]}}}
ADD["function"]["parameters"]["properties"] = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ASK = {"role": "user", "content": "41235 + 27184?"}
HERE = Installed(root=Path(), bin=Path(sys.executable).parent, seconds=1.0, bytes=1 << 20)

# An agent in the standard library. argv[1] says what is wrong with it.
AGENT = """
import json, os, sys, urllib.request
def ask(messages):
    body = {"model": "m", "messages": messages, "tools": [json.loads(os.environ["TOOL"])]}
    if sys.argv[1] == "force":
        body["tool_choice"] = "required"
    if sys.argv[1] == "old" and len(messages) == 1:
        body["functions"] = [body["tools"][0]["function"]]
    body = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
way = sys.argv[1]
messages = [{"role": "user", "content": "41235 + 27184?"}]
answer = ask(messages)
while way in ("whole", "amend", "force", "old") and answer.get("tool_calls"):
    call = answer["tool_calls"][0]
    numbers = json.loads(call["function"]["arguments"])
    result = str(numbers["a"] + numbers["b"])
    if way == "amend":
        answer["content"] = "By the way."
    messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    answer = ask(messages)
print({"once": "The tool said: 68419", "crash": "The tool said: 68419", "mute": "68419"}.get(way, answer["content"]))
sys.exit(3 if way == "crash" else 0)
"""


def agent(way: str, dialect: Dialect = Dialect.CHAT, **options) -> tuple[Harness, Variant]:
    variant = Variant(
        dialect=dialect,
        streamed=options.pop("streamed", False),
        command=(sys.executable, "-c", AGENT.replace("$", "$$"), way),
        env={"TOOL": json.dumps(ADD)},
    )
    return Harness(name="agent", requirements=("agent==1",), variants=(variant,), **options), variant


@pytest.mark.parametrize("mode", list(Mode))
def test_a_harness_that_uses_its_tool_is_ok_in_every_mode(tmp_path, mode):
    with Bench(tmp_path, Setting(mode=mode)) as bench:
        outcome = bench.run(*agent("whole"), HERE)
    assert outcome.problems == ()
    assert outcome.calls == 2
    assert outcome.samples == (1 if mode in (Mode.TRAIN, Mode.EVAL) else 0)
    assert outcome.prompts.get("continued") == (1 if mode in (Mode.TRAIN, Mode.EVAL) else None)


@pytest.mark.parametrize(
    ("way", "options", "problem"),
    [
        ("once", {}, "1 calls recorded where the task takes 2"),
        ("crash", {}, "exit status 3"),
        ("mute", {}, "its output lacks the model's answer"),
        ("whole", {"streamed": True}, "was plain, unlike its entry"),
    ],
)
def test_what_a_harness_does_wrong_is_told(tmp_path, way, options, problem):
    with Bench(tmp_path) as bench:
        outcome = bench.run(*agent(way, **options), HERE)
    assert not outcome.ok
    assert problem in "; ".join(outcome.problems)


def test_a_harness_that_hangs_is_ended(tmp_path):
    variant = Variant(
        dialect=Dialect.CHAT, streamed=False, command=(sys.executable, "-c", "import time; time.sleep(999)")
    )
    harness = Harness(name="sleeper", requirements=("sleeper==1",), variants=(variant,), timeout_s=0.5)
    assert drive(harness, variant, HERE, url="http://127.0.0.1:9", work=tmp_path).exit_code is None


def test_the_model_quotes_the_last_result_and_never_repeats_a_call():
    messages, seen = [ASK], set()
    for number in range(3):
        step = decide({"messages": messages, "tools": [ADD]}, turns=4)
        assert isinstance(step, Use)
        seen.add((step.arguments["a"], step.arguments["b"]))
        total = str(step.arguments["a"] + step.arguments["b"])
        call = {"id": str(number), "function": {"name": "add", "arguments": json.dumps(step.arguments)}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(number), "content": total},
        ]
    assert len(seen) == 3
    assert decide({"messages": messages, "tools": [ADD]}, turns=4) == Say(text=QUOTE + RESULT)


@pytest.mark.parametrize("format", ["smol", "qwen"])
@pytest.mark.parametrize("odd", [False, True])
def test_what_is_told_of_prompts_rendered_anew_is_what_an_engine_would_do(tmp_path, format, odd):
    """`samples_anew` is reckoned; here it is also tried."""
    settings = [Setting(tokens=who, format=format, odd_arguments=odd, turns=4) for who in ("gateway", "engine")]
    outcomes = []
    for setting in settings:
        folder = tmp_path / setting.tokens
        folder.mkdir()
        with Bench(folder, setting) as bench:
            outcomes.append(bench.run(*agent("whole"), HERE))
    made_here, made_there = outcomes
    assert made_here.problems == made_there.problems == ()
    assert made_here.samples == 1
    assert made_here.samples_anew == made_there.samples == (4 if odd else 1)
    assert made_there.samples_anew is None


@pytest.mark.parametrize(
    ("way", "fields", "problem"),
    [
        ("amend", {}, "broke: history rewritten"),
        ("amend", {"rewrites": (Break.HISTORY_REWRITTEN,)}, ""),
        ("whole", {"rewrites": (Break.HISTORY_REWRITTEN,)}, "which did not come"),
        ("old", {}, "engine: functions in place of tools"),
        ("old", {"left_to_engine": "functions in place of tools"}, ""),
    ],
)
def test_a_history_that_breaks_must_be_in_the_catalog(tmp_path, way, fields, problem):
    harness, variant = agent(way)
    with Bench(tmp_path) as bench:
        outcome = bench.run(harness, replace(variant, **fields), HERE)
    assert outcome.ok == (not problem)
    assert problem in "; ".join(outcome.problems)


def test_the_table_tells_what_became_of_calls_that_are_forced(tmp_path):
    """The last answer is none, as it would be of a model that says it in words."""
    with Bench(tmp_path) as bench:
        outcome = bench.run(*agent("force"), HERE)
    assert outcome.problems == ()
    assert outcome.samples == 1
    assert "| 1 a forced tool call, left free, 1 a forced tool call, left free and not made |" in to_markdown(
        [outcome], {}
    )


def test_odd_arguments_mean_the_same():
    value = {"path": "é/ü 😀", "n": [1, 2.5, None, True], "more": {"a": "x", "b": ""}}
    assert json.loads(write_oddly(value)) == value
    assert write_oddly(value) != json.dumps(value)


def test_the_catalog_is_pinned_and_its_programs_exist():
    names = [harness.name for harness in HARNESSES]
    assert len(set(names)) == len(names)
    for harness in HARNESSES:
        assert re.fullmatch(r"[0-9.]+", harness.version), harness.name
        assert harness.variants, harness.name
        for variant in harness.variants:
            for part in variant.command:
                if part.startswith("$programs/"):
                    assert (PROGRAMS / part.removeprefix("$programs/")).is_file(), part


def test_the_table_names_what_went_wrong(tmp_path):
    with Bench(tmp_path) as bench:
        outcomes = [bench.run(*agent(way), HERE) for way in ("whole", "crash")]
    table = to_markdown(outcomes, {"agent": HERE})
    assert table.count("\n") == 3  # both runs are of the same variant
    assert "| 2 / 1 | 2 exact / 1 exact | 1 | 1 | 1 | – |" in table
    assert "| ok / exit status 3" in table
    assert [record["ok"] for record in json.loads(to_json(outcomes, {}))] == [True, False]
