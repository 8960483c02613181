"""A scripted engine, a gateway before it, and what one harness's run through both comes to."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fakes.gateway import RunningGateway
from harnesses.catalog import Dialect, Harness, Variant
from harnesses.drive import Ran, drive
from harnesses.engine import QUOTE, RESULT, ToolUsingEngine
from harnesses.install import Installed
from outrider import trajectory
from outrider.types import Call, CallState, Fidelity, Mode

STORED = {
    Dialect.CHAT: "openai_chat",
    Dialect.RESPONSES: "openai_responses",
    Dialect.MESSAGES: "anthropic_messages",
}
EXPECTED = {Mode.TRAIN: Fidelity.EXACT, Mode.EVAL: Fidelity.EXACT, Mode.RECORD: Fidelity.TEXT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the store holds of one run, and what is wrong with it."""

    harness: str
    version: str
    dialect: Dialect
    label: str
    streamed: bool
    calls: int
    fidelity: dict[str, int]
    samples: int
    """Training rows after merging calls by exact token prefix."""
    problems: tuple[str, ...]
    seconds: float
    output: str

    @property
    def ok(self) -> bool:
        return not self.problems


class Bench:
    """Serves while entered. Each run gets an attempt and a key of its own."""

    def __init__(self, folder: Path, mode: Mode = Mode.TRAIN, *, turns: int = 2, odd_arguments: bool = False) -> None:
        self._folder = folder
        self._mode = mode
        self._turns = turns
        self._engine = ToolUsingEngine(turns=turns, odd_arguments=odd_arguments)
        self._runs = 0

    def __enter__(self) -> Self:
        self._engine.__enter__()
        self._gateway = RunningGateway(self._engine, self._folder / "store.sqlite3").__enter__()
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
        key = self._gateway.open(attempt, mode=self._mode, sampling={"temperature": 1.0})
        asked = len(self._engine.received)
        ran = drive(harness, variant, installed, url=f"{self._gateway.base_url}/s/{key}", work=work)
        self._gateway.store.seal(attempt)
        calls = self._gateway.store.calls(attempt)
        rows = trajectory.build(calls).samples(rollout_id=attempt, group_id=harness.name).samples
        problems = problems_of_run(ran)
        if self._mode is Mode.PASSTHROUGH:
            count = len(self._engine.received) - asked
            problems += ["recorded in passthrough mode"] if calls else []
        else:
            count = len(calls)
            problems += problems_of_calls(calls, variant, EXPECTED[self._mode], turns=self._turns)
        return Outcome(
            harness=harness.name,
            version=harness.version,
            dialect=variant.dialect,
            label=variant.label,
            streamed=variant.streamed,
            calls=count,
            fidelity=dict(Counter(call.fidelity.value for call in calls)),
            samples=len(rows),
            problems=tuple(problems),
            seconds=ran.seconds,
            output=ran.output,
        )


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
