"""A scripted engine, a gateway before it, and what one harness's run through both comes to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from fakes.gateway import RunningGateway
from harnesses.catalog import Dialect, Harness, Variant
from harnesses.drive import Ran, drive
from harnesses.engine import RENDERER, Remembering, ToolUsingEngine
from harnesses.formats import write_folder
from harnesses.install import Installed
from harnesses.model import QUOTE, RESULT
from outrider import trajectory
from outrider.gateway.continuation.request import read_chat
from outrider.types import Call, CallState, Fidelity, Mode

STORED = {
    Dialect.CHAT: "openai_chat",
    Dialect.RESPONSES: "openai_responses",
    Dialect.MESSAGES: "anthropic_messages",
}
BROKE, ENGINE = "broke: ", "engine: "  # as `Call.continuation` begins
EXPECTED = {Mode.TRAIN: Fidelity.EXACT, Mode.EVAL: Fidelity.EXACT, Mode.RECORD: Fidelity.TEXT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the store holds of one run, and what is wrong with it."""

    harness: str
    version: str
    dialect: Dialect
    label: str
    streamed: bool
    odd_arguments: bool
    calls: int
    fidelity: dict[str, int]
    prompts: dict[str, int]
    """How the prompts came about, as `Call.continuation` tells it; empty where the engine made one."""
    notes: dict[str, int]
    """What is told there besides."""
    samples: int
    """Training rows after merging calls by exact token prefix."""
    samples_anew: int | None
    """The same had each prompt been rendered anew, as an engine does it; None where the gateway made none."""
    problems: tuple[str, ...]
    seconds: float
    output: str

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the bench serves."""

    mode: Mode = Mode.TRAIN
    tokens: str = "gateway"
    """Who makes the prompts: gateway or engine."""
    format: str = "qwen"
    """One of `formats.FORMATS`."""
    turns: int = 2
    """Calls that the task takes."""
    odd_arguments: bool = False
    thinking: bool = False
    """It reasons before each answer. Many harnesses send no reasoning back, so the catalog says nothing of breaks."""
    rich: bool = False
    """It says a sentence and makes two calls at once. Some harnesses keep but one of them, or leave the text out."""

    @property
    def continues(self) -> bool:
        return self.tokens == "gateway" and self.mode in (Mode.TRAIN, Mode.EVAL)


DEFAULT = Setting()


class Bench:
    """Serves while entered. Each run gets an attempt and a key of its own."""

    def __init__(self, folder: Path, setting: Setting = DEFAULT) -> None:
        self._folder = folder
        self._setting = setting
        self._tokenizer = write_folder(setting.format, folder / "format")
        self._engine = ToolUsingEngine(
            self._tokenizer,
            turns=setting.turns,
            odd_arguments=setting.odd_arguments,
            thinking=setting.thinking,
            rich=setting.rich,
        )
        self._runs = 0

    def __enter__(self) -> Self:
        self._engine.__enter__()
        self._gateway = RunningGateway(
            self._engine,
            self._folder / "store.sqlite3",
            tokens=self._setting.tokens,
            tokenizer=str(self._tokenizer),
            renderer=RENDERER,
        ).__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._gateway.__exit__(*error)
        self._engine.__exit__(*error)

    def run(self, harness: Harness, variant: Variant, installed: Installed) -> Outcome:
        self._runs += 1
        attempt = f"{self._runs}-{harness.name}"
        work = self._folder / attempt
        work.mkdir()
        # As a trainer does; a harness that asks for temperature 0 would give nothing to train on.
        key = self._gateway.open(attempt, mode=self._setting.mode, sampling={"temperature": 1.0})
        asked = len(self._engine.received)
        ran = drive(harness, variant, installed, url=f"{self._gateway.base_url}/s/{key}", work=work)
        self._gateway.store.seal(attempt)
        calls = self._gateway.store.calls(attempt)
        problems = problems_of_run(ran)
        if self._setting.mode is Mode.PASSTHROUGH:
            count = len(self._engine.received) - asked
            problems += ["recorded in passthrough mode"] if calls else []
        else:
            count = len(calls)
            turns = self._setting.turns if not self._setting.rich else 2
            problems += problems_of_calls(calls, variant, EXPECTED[self._setting.mode], turns=turns)
        if self._setting.continues and not (self._setting.thinking or self._setting.rich):
            problems += problems_of_prompts(calls, variant)
        anew = rendered_anew(calls, self._engine.renderer) if self._setting.continues else None
        return Outcome(
            harness=harness.name,
            version=harness.version,
            dialect=variant.dialect,
            label=variant.label,
            streamed=variant.streamed,
            odd_arguments=self._setting.odd_arguments,
            calls=count,
            fidelity=dict(Counter(call.fidelity.value for call in calls)),
            prompts=dict(Counter(outcome_of(call)[0] for call in calls)),
            notes=dict(Counter(note for call in calls for note in outcome_of(call)[1:])),
            samples=count_samples(calls),
            samples_anew=None if anew is None else count_samples(anew),
            problems=tuple(problems),
            seconds=ran.seconds,
            output=ran.output,
        )


def outcome_of(call: Call) -> list[str]:
    """How its prompt came about, then notes."""
    return call.continuation.split("; ")


def count_samples(calls: Sequence[Call]) -> int:
    return len(trajectory.build(calls).samples(rollout_id="rollout", group_id="group").samples)


def rendered_anew(calls: Sequence[Call], renderer: Remembering) -> list[Call]:
    """The same calls had the engine rendered each history."""
    made = []
    for call in calls:
        if call.prompt_ids is None or not call.continuation:
            made.append(call)
            continue
        said = renderer.asked(call.prompt_ids)
        if call.dialect == STORED[Dialect.CHAT]:  # an agent may retell a call as text, which is all that an engine gets
            asked = read_chat(call.request, shows_ids=False, shows_logprobs=False, joint=renderer.joint, answered=True)
            said = asked.messages, asked.tools, asked.options
        made.append(replace(call, prompt_ids=np.array(renderer.anew(*said), dtype=np.int32)))
    return made


def problems_of_run(ran: Ran) -> list[str]:
    """Did the harness end well, and did the tool's result reach the model and come back in its answer?"""
    if ran.exit_code != 0:
        last = " ".join(ran.output.split())[-300:]
        return [f"exit status {ran.exit_code}: {last}" if ran.exit_code is not None else f"out of time: {last}"]
    quote = re.escape("".join(QUOTE.split())) + f".{{0,400}}?{RESULT}"
    told = ("".join(stream.split()) for stream in (ran.stdout, ran.stderr))  # harnesses break lines as they like
    if not any(re.search(quote, text) for text in told):
        return ["its output lacks the model's answer with the tool's result"]
    return []


def problems_of_calls(calls: list[Call], variant: Variant, expected: Fidelity, *, turns: int = 2) -> list[str]:
    if len(calls) < turns:
        return [f"{len(calls)} calls recorded where the task takes {turns}"]
    found = []
    for call in calls:
        what = f"call {call.seq}"
        if call.state is not CallState.COMPLETE:
            found.append(f"{what} is {call.state.value}: {call.error}")
        elif call.fidelity is not expected:
            found.append(f"{what} is {call.fidelity.value}, not {expected.value}: {call.fidelity_reason}")
        if call.dialect != STORED[variant.dialect]:
            found.append(f"{what} came as {call.dialect}, not as {STORED[variant.dialect]}")
        if call.streamed is not variant.streamed:
            found.append(f"{what} was {'streamed' if call.streamed else 'plain'}, unlike its entry in the catalog")
    return found


def problems_of_prompts(calls: list[Call], variant: Variant) -> list[str]:
    """Does each conversation go on with its own tokens, but for what the catalog says of this harness?"""
    gone_on = {"opened", "continued"}
    found = {outcome_of(call)[0] for call in calls} - gone_on
    expected = {BROKE + cause for cause in variant.rewrites}
    expected |= {ENGINE + variant.left_to_engine} if variant.left_to_engine else set()
    return [
        *(
            f"unlike its entry in the catalog: {one or 'a prompt that the engine made'}"
            for one in sorted(found - expected)
        ),
        *(f"its entry in the catalog tells of {one}, which did not come" for one in sorted(expected - found)),
    ]
