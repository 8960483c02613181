"""Whatever is said: a prompt begins with a branch to the id, or a break is counted."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.chat_format import END, TEMPLATES, spelled_out, write_format, write_library_format
from fakes.memory_store import MemoryStore
from fakes.records import make_call
from fakes.talk import TOOL
from outrider.dialects.openai_chat import OpenAIChat
from outrider.dialects.openai_completions import OpenAICompletions
from outrider.gateway.capture import capture
from outrider.gateway.continuation.turns import Continuation
from outrider.gateway.telemetry.counters import Counters
from outrider.renderers.library import LibraryRenderer
from outrider.renderers.template import TemplateRenderer

CHAT, COMPLETIONS = OpenAIChat(), OpenAICompletions()
MARKERS = ["<|im_end|>", "<|eot_id|>", "</tool_call>", "<think>", "</think>", "<tool_response>", "\n", " ", "é", "{"]

texts = st.lists(st.sampled_from([*MARKERS, "yes", "no", "5", "the file"]), min_size=1, max_size=5).map("".join)
thoughts = st.sampled_from(["", "", "hm", "so\nthen é"])
arguments = st.dictionaries(
    st.sampled_from(["a", "é", "n"]),
    st.sampled_from([1, 1.0, 2.5, True, None, "x<y", "é", [1, {"k": 2.0}]]),
    max_size=3,
)


@dataclass
class Said:
    """What the model samples, and how."""

    thought: str
    text: str
    calls: list[dict[str, Any]]
    spelled: bool
    """A byte a token, as a tokenizer would not do it."""
    cut: bool
    """Without the end of the turn."""


@dataclass
class Step:
    said: Said
    new: list[str]
    """Contents of what the agent says next, where it does not answer calls."""
    late_system: bool
    seed: int


steps = st.builds(
    Step,
    said=st.builds(
        Said,
        thought=thoughts,
        text=st.sampled_from(["", "Fine.", "Fine. é\n\nReally", "I <b>think</b>"]),
        calls=st.lists(arguments, max_size=2),
        spelled=st.booleans(),
        cut=st.booleans(),
    ),
    new=st.lists(texts, min_size=1, max_size=2),
    late_system=st.booleans(),
    seed=st.integers(0, 2**16),
)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    made = {name: TemplateRenderer(write_format(root / name, name)) for name in TEMPLATES}
    return {**made, "library": LibraryRenderer(write_library_format(root / "library"))}


@dataclass
class Bench:
    """An agent, the continuation and a model, without a network between them."""

    name: str
    renderer: TemplateRenderer
    counters: Counters = field(default_factory=Counters)
    branches: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        self.continuation = Continuation(self.renderer, MemoryStore(), [CHAT], COMPLETIONS, self.counters)

    async def call(self, messages, said):
        """The prompt, what was counted for it, and the message that the agent gets."""
        body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
        prepared = CHAT.prepare(CHAT.parse(body), overrides={}, tokens=True)
        turn, _ = await self.continuation.turn("attempt", prepared, b"/v1/chat/completions")
        reader = turn.reader(CHAT.reader(prepared), prepared)
        ids = self.sample(said)
        reason = "length" if said.cut else "stop"
        choice = {"index": 0, "text": "?", "token_ids": ids, "finish_reason": reason}
        choice["logprobs"] = {"tokens": ["?"] * len(ids), "token_logprobs": [-0.5] * len(ids)}
        usage = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(ids)}
        answer = json.loads(reader.body(json.dumps({"choices": [choice], "usage": usage}).encode()))
        found = capture(reader.result())
        assert not found.reason
        turn.committed(make_call(prompt_ids=found.prompt_ids, choices=found.choices, id=str(len(self.branches))))
        before = list(self.branches)
        self.branches.append(turn.prompt_ids + ids)
        return turn.prompt_ids, turn.outcome, before, answer["choices"][0]["message"]

    def sample(self, said):
        text = f"<think>\n{said.thought}\n</think>\n\n" if said.thought else ""
        text += said.text
        for call in said.calls:
            text += (
                f'\n<tool_call>\n{{"name": "add", "arguments": {json.dumps(call, ensure_ascii=False)}}}\n</tool_call>'
            )
        encoded = self.renderer.text.encode(text)
        if said.spelled and self.name == "smol":  # where no marker has to be one token
            encoded = spelled_out(self.renderer.text._full, text)
        return encoded + ([] if said.cut and encoded else [self.renderer.text.added[END.get(self.name, "<|im_end|>")]])


def cosmetic(message, chance):
    """The message as another program would write it."""
    echo = json.loads(json.dumps(message))
    for call in echo.get("tool_calls", ()):
        parsed = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(
            dict(reversed(parsed.items())), ensure_ascii=chance.random() < 0.5, indent=chance.choice([None, 2])
        )
    if echo["content"] is None and chance.random() < 0.5:
        echo["content"] = ""
    elif isinstance(echo["content"], str) and echo["content"] and chance.random() < 0.5:
        echo["content"] = [{"type": "text", "text": echo["content"], "cache_control": {"type": "ephemeral"}}]
    return dict(reversed(echo.items()))


def answers(message, step):
    if message.get("tool_calls"):
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": step.new[number % len(step.new)]}
            for number, call in enumerate(message["tool_calls"])
        ]
    made = [{"role": "user", "content": step.new[0]}]
    return [*made, {"role": "system", "content": step.new[-1]}] if step.late_system else made


@settings(deadline=None, max_examples=40)
@given(system=st.booleans(), script=st.lists(steps, min_size=2, max_size=6), data=st.data())
@pytest.mark.parametrize("name", [*TEMPLATES, "library"])
def test_an_honest_agent_continues_wherever_the_template_lets_it(renderers, name, system, script, data):
    bench = Bench(name, renderers[name])

    async def run():
        messages = [{"role": "system", "content": "Be brief."}] if system else []
        messages.append({"role": "user", "content": "Begin."})
        dropped = False  # what the template must forget before the next prompt
        thinks = False
        for number, step in enumerate(script):
            chance = random.Random(step.seed)
            said = step.said
            if name == "llama":
                said.thought, said.calls = "", []  # of its own format; see the tests of that
            prompt, outcome, before, message = await bench.call(messages, said)
            if number == 0:
                assert outcome == "opened"
            elif dropped:
                assert outcome == "broke: reasoning dropped by template"
            else:
                assert outcome == "continued"
                assert prompt[: len(before[-1])] == before[-1]
            new = answers(message, step)
            # Qwen-like: reasoning since the last question is forgotten once there is a new one.
            thinks = (thinks and not dropped) or bool(said.thought)
            asks = any(one["role"] == "user" for one in new)
            dropped = name in ("qwen", "library") and thinks and asks
            if asks:
                thinks = False
            messages = [*(cosmetic(one, chance) if one["role"] == "assistant" else one for one in messages)]
            messages += [cosmetic(message, chance), *new]
        assert sum(bench.counters.snapshot()["continuation"].values()) == len(script)

    asyncio.run(run())


@settings(deadline=None, max_examples=40)
@given(script=st.lists(steps, min_size=2, max_size=6), data=st.data())
@pytest.mark.parametrize("name", [*TEMPLATES, "library"])
def test_a_dishonest_agent_gets_a_branch_or_a_break(renderers, name, script, data):
    """It drops, repeats and changes messages as it likes."""
    bench = Bench(name, renderers[name])

    async def run():
        messages = [{"role": "user", "content": "Begin."}]
        for step in script:
            if name == "llama":
                step.said.thought, step.said.calls = "", []
            prompt, outcome, before, message = await bench.call(messages, step.said)
            extended = [branch for branch in before if prompt[: len(branch)] == branch]
            assert bool(extended) >= (outcome == "continued")
            assert outcome in ("opened", "continued") or outcome.startswith("broke: ")
            messages = [*messages, message, *answers(message, step)]
            for _ in range(data.draw(st.integers(0, 2))):
                at = data.draw(st.integers(0, len(messages) - 1))
                change = data.draw(st.sampled_from(["drop", "text", "reasoning", "shorten"]))
                if change == "drop" and len(messages) > 1:
                    del messages[at]
                elif change == "text":
                    messages[at] = {**messages[at], "content": (messages[at]["content"] or "") + " "}
                elif change == "reasoning":
                    messages[at] = {k: v for k, v in messages[at].items() if k != "reasoning_content"}
                elif change == "shorten":
                    del messages[at + 1 :]
            if name == "llama" and messages[0]["role"] == "system":
                messages.insert(0, {"role": "user", "content": "Begin."})

    asyncio.run(run())
