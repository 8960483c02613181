"""A made-up run to look at: a run folder and a small store. `python tests/reports/fabricate.py DIR` writes its report.

The numbers are drawn, not measured; the shapes are those of a real run of the calculator agent.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outrider import config as configuration
from outrider.types import (
    Attempt,
    Call,
    CallState,
    Choice,
    Failure,
    Fidelity,
    Reward,
    Rollout,
    RolloutState,
    Task,
    Usage,
)

HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b]0;owned\x07 \u202egnp.exe [bold]rich[/bold] [/] \ud800 &amp; \x00"


@dataclass
class ReadStore:
    """The reading half of a store, in memory."""

    all_rollouts: dict[str, Rollout] = field(default_factory=dict)
    all_attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    all_calls: dict[str, list[Call]] = field(default_factory=dict)
    all_rewards: dict[str, list[Reward]] = field(default_factory=dict)

    def rollout(self, rollout_id):
        return self.all_rollouts.get(rollout_id)

    def rollouts(self, *, split=None, step=None, state=None):
        return [
            r
            for r in self.all_rollouts.values()
            if split in (None, r.split) and step in (None, r.step) and state in (None, r.state)
        ]

    def attempts(self, rollout_id):
        return self.all_attempts.get(rollout_id, [])

    def calls(self, attempt_id, after=0):
        return self.all_calls.get(attempt_id, [])

    def rewards(self, attempt_id):
        return self.all_rewards.get(attempt_id, [])


class Words:
    """A tokenizer of a kind: words and spaces become ids as they are met."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        found = []
        for piece in re.findall(r"\s?\w+|\s|[^\w\s]+", text):
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
            found.append(self.ids[piece])
        return found

    def __call__(self, ids) -> list[str]:
        return [self.pieces[i] for i in ids]


WORDS = Words()
SYSTEM = 'You use a calculator. To call it, answer with JSON: {"tool": "add|sub|mul", "a": number, "b": number}.'
EXAMPLE = [
    {"role": "user", "content": "What is 3 plus 4?"},
    {"role": "assistant", "content": '{"tool": "add", "a": 3, "b": 4}'},
    {"role": "user", "content": "Result: 7"},
    {"role": "assistant", "content": "The answer is 7."},
]


def call(attempt_id: str, position: int, messages: list[dict[str, str]], reply: str, rng, **changes: Any) -> Call:
    prompt = WORDS.encode("".join(f"<|{m['role']}|>{m['content']}\n" for m in messages) + "<|assistant|>")
    ids = WORDS.encode(reply) + WORDS.encode("<|end|>")
    logprobs = [-rng.expovariate(4) if rng.random() < 0.85 else -rng.expovariate(0.5) for _ in ids]
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}, "finish_reason": "stop"}]}
    made = {
        "id": f"{attempt_id}-c{position}",
        "attempt_id": attempt_id,
        "dialect": "openai_chat",
        "model": "policy",
        "state": CallState.COMPLETE,
        "status": 200,
        "streamed": False,
        "request": json.dumps({"model": "policy", "messages": messages}).encode(),
        "response": json.dumps(body).encode(),
        "prompt_ids": np.array(prompt, np.int32),
        "choices": (
            Choice(
                index=0,
                token_ids=np.array(ids, np.int32),
                logprobs=np.array(logprobs, np.float32),
                finish_reason="stop",
            ),
        ),
        "usage": Usage(prompt_tokens=len(prompt), completion_tokens=len(ids)),
        "fidelity": Fidelity.EXACT,
        "sampling": {"temperature": 1.0, "max_tokens": 64},
        "version_start": 0,
        "version_end": 0,
        "started_at": 1_764_500_000.0 + position,
        "duration_s": 0.9 + rng.random(),
        "first_token_s": 0.1 + rng.random() / 10,
        "seq": position + 1,
    }
    return Call(**(made | changes))


def add_rollout(store: ReadStore, rollout_id: str, task: Task, split: str, step: int, won: bool, rng) -> Rollout:
    """One rollout with its attempt, two calls and a reward."""
    attempt = Attempt(
        id=f"{rollout_id}.a1", rollout_id=rollout_id, number=1, started_at=1e9, ended_at=1e9 + 2.5, exit_code=0,
        stdout_tail="The answer is 42.\n",
    )  # fmt: skip
    a, b = task.fields["a"], task.fields["b"]
    tool = json.dumps({"tool": "mul", "a": a, "b": b}) if won else f"I think {a} times {b} is about {a * b + 7}."
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE, {"role": "user", "content": task.fields["question"]}]
    calls = [call(attempt.id, 0, messages, tool, rng)]
    result = f"Result: {a * b}" if won else "Result: error, that was no JSON"
    more = [*messages, {"role": "assistant", "content": tool}, {"role": "user", "content": result}]
    calls.append(call(attempt.id, 1, more, f"The answer is {a * b if won else a + b}.", rng))
    value = 1.0 if won else rng.choice([0.0, 0.2, 0.4])
    parts = {"format": float(won or value > 0), "tool": float(won), "answer": float(won)}
    reason = "right tool, arguments and answer" if won else "the reply was no JSON tool call"
    rollout = Rollout(
        id=rollout_id, task=task, group_id=rollout_id.rpartition("-")[0], split=split, step=step,
        state=RolloutState.SUCCEEDED, attempt=1, reward=value, reason=reason,
    )  # fmt: skip
    store.all_rollouts[rollout_id] = rollout
    store.all_attempts[rollout_id] = [attempt]
    store.all_calls[attempt.id] = calls
    store.all_rewards[attempt.id] = [
        Reward(attempt_id=attempt.id, value=value, reason=reason, parts=parts, source="calc", created_at=1e9)
    ]
    return rollout


def wilson(p: float, n: int) -> tuple[float, float]:
    z = 1.96
    centre, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def evaluation(name: str, step: int, greedy: float, sampled: float, wall_s: float, n: int = 200) -> dict[str, Any]:
    def one(p: float) -> dict[str, Any]:
        low, high = wilson(p, n)
        return {"success": p, "n": n, "tasks": n, "low": low, "high": high, "reward_mean": 0.2 + 0.8 * p, "unscored": 0}

    return {
        "kind": "eval", "name": name, "step": step, "policy_version": step, "greedy": one(greedy),
        "sampled": one(sampled), "failures": {}, "wall_s": wall_s, "peak_rss_bytes": 5.1e9,
    }  # fmt: skip


def step_record(step: int, steps: int, rng) -> dict[str, Any]:
    share = 1 / (1 + math.exp(-6 * (step / steps - 0.45)))
    noise = rng.gauss(0, 0.03)
    rollouts = 14.5 - 0.5 * share + rng.random()
    excluded = {"zero_variance_group": rng.randint(1, 3)} if step > 2 else {}
    return {
        "kind": "step", "step": step, "policy_version": step, "reward_mean": 0.28 + 0.62 * share + noise,
        "reward_std": 0.36 - 0.2 * share, "success": 0.14 + 0.7 * share + noise, "rollouts": 64, "groups": 8,
        "groups_trained": 8 - excluded.get("zero_variance_group", 0), "samples": 64, "tokens": 3100 - 300 * step,
        "tokens_computed": 9000, "tokens_per_s": 190 + rng.gauss(0, 9), "loss": -0.01 + rng.gauss(0, 0.006),
        "grad_norm": 1.4 - 0.7 * share + rng.gauss(0, 0.08), "lr": 2e-5 * min(1, step / 2),
        "entropy": 0.82 - 0.5 * share, "kl_behaviour": 2e-4 + rng.random() * 2e-4, "kl_reference": 0.001 * step,
        "ratio_mean": 1 + rng.gauss(0, 0.002), "clip_fraction": rng.random() * 0.01,
        "logprob_diff_mean": 0.011 + rng.random() * 0.003, "logprob_diff_max": 0.18 + rng.random() * 0.1,
        "times": {"total": rollouts + 17.2, "rollouts": rollouts, "samples": 0.3, "forward_backward": 14.6,
                  "publish": 1.5, "rest": 0.8},
        "excluded": excluded, "failures": {"engine": 2} if step == 4 else {}, "peak_rss_bytes": 5.2e9,
        "wall_s": 60.0 + 32 * step,
    }  # fmt: skip


def fabricate(
    run_dir: Path, *, steps: int = 8, wanted: int = 8, after: bool = True, hostile: bool = False, tasks: int = 60
) -> ReadStore:
    """Write a run folder with `steps` of `wanted` steps done; `after` says whether it was evaluated at the end."""
    rng = random.Random(5)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = configuration.parse(
        {
            "tasks": {"train": "train.jsonl", "eval": "heldout.jsonl"},
            "harness": {"command": ["python", "agent.py", "{question}"]},
            "reward": {"name": "reward:score"},
            "train": {"steps": wanted},
            "seed": 3,
        }
    )
    (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
    records = [evaluation("before", 0, 0.69, 0.16, 41.0)]
    for step in range(1, steps + 1):
        records.append(step_record(step, wanted, rng))
        if step == 4:
            records.append(evaluation("step-4", 4, 0.83, 0.55, 215.0, n=100))
    if after:
        records.append(evaluation("after", steps, 0.91, 0.835, 360.0))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    store = ReadStore()
    splits = [("before/greedy", 0.69), ("before/sampled", 0.16)]
    splits += [("after/greedy", 0.91), ("after/sampled", 0.835)] if after else []
    for split, share in splits:
        for number in range(tasks):
            a, b = 11 + number, 90 - number
            task = Task(id=f"eval-{number:04d}", fields={"a": a, "b": b, "question": f"What is {a} times {b}?"})
            add_rollout(store, f"{split.replace('/', '-0000-')}-{task.id}", task, split, 0, rng.random() < share, rng)
    for step in range(1, steps + 1):
        for member in range(4):
            task = Task(id=f"train-{step:04d}", fields={"a": step, "b": 7, "question": f"What is {step} times 7?"})
            add_rollout(store, f"step-{step:04d}-000-{member}", task, "train", step, member > 1, rng)
    if steps:
        add_failures(store)
    if hostile:
        make_hostile(store, rng)
    return store


def add_failures(store: ReadStore) -> None:
    """A rollout that needed a second attempt, and one that failed for good."""
    rollout = store.all_rollouts["step-0001-000-0"]
    store.all_rollouts[rollout.id] = Rollout(**(_fields(rollout) | {"attempt": 2}))
    first = store.all_attempts[rollout.id][0]
    lost = Attempt(
        id=f"{rollout.id}.a1", rollout_id=rollout.id, number=1, started_at=1e9, ended_at=1e9 + 3, exit_code=1,
        failure=Failure.ENGINE, reason="the engine answered 503", stderr_tail="Traceback …\nAPIStatusError: 503\n",
    )  # fmt: skip
    second = Attempt(**(_fields(first) | {"id": f"{rollout.id}.a2", "number": 2}))
    store.all_attempts[rollout.id] = [lost, second]
    store.all_calls[second.id] = store.all_calls[first.id]
    store.all_rewards[second.id] = store.all_rewards[first.id]
    dead = store.all_rollouts["step-0001-000-1"]
    store.all_rollouts[dead.id] = Rollout(
        **(
            _fields(dead)
            | {"state": RolloutState.FAILED, "reward": None, "attempt": 1, "failure": Failure.REWARD_INVALID,
               "reason": "the reward returned NaN"}
        )
    )  # fmt: skip
    store.all_rewards[f"{dead.id}.a1"] = []


def make_hostile(store: ReadStore, rng) -> None:
    """Hostile text in everything that a model, a harness, a reward or a task file can write."""
    for split in ("before/greedy", "after/greedy"):
        rollout_id = f"{split.replace('/', '-0000-')}-aaa"
        task = Task(id="aaa" + HOSTILE, fields={"a": 1, "b": 2, "question": HOSTILE, HOSTILE: HOSTILE})
        rollout = add_rollout(store, rollout_id, task, split, 0, split.startswith("after"), rng)
        attempt = store.all_attempts[rollout_id][0]
        store.all_attempts[rollout_id] = [
            Attempt(**(_fields(attempt) | {"stdout_tail": HOSTILE, "stderr_tail": HOSTILE, "reason": HOSTILE}))
        ]
        store.all_rollouts[rollout_id] = Rollout(**(_fields(rollout) | {"reason": HOSTILE}))
        messages = [{"role": "user" + HOSTILE, "content": HOSTILE}]
        store.all_calls[attempt.id] = [
            call(attempt.id, 0, messages, HOSTILE, rng, error=HOSTILE, model=HOSTILE),
            call(attempt.id, 1, messages, HOSTILE, rng, fidelity=Fidelity.TEXT, prompt_ids=None, choices=()),
        ]
        store.all_rewards[attempt.id] = [
            Reward(attempt_id=attempt.id, value=rollout.reward or 0.0, reason=HOSTILE, parts={HOSTILE: 1.0})
        ]


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


if __name__ == "__main__":
    from outrider.reports.report import write_report

    target = Path(sys.argv[1])
    flags = sys.argv[2:]
    made = fabricate(
        target,
        steps=3 if "unfinished" in flags else 8,
        after="unfinished" not in flags,
        hostile="hostile" in flags,
    )
    print(write_report(target, made, tokenizer=WORDS if "tokens" in flags else None))
