"""Records with plausible contents, for tests that care about one field."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.types import Call, CallState, Choice, Fidelity, Json, Rollout, Runs, Task, Usage


def make_call(id: str, attempt_id: str = "attempt-1", **fields: Any) -> Call:
    defaults: Json = {
        "dialect": "openai_chat",
        "model": "policy",
        "state": CallState.COMPLETE,
        "status": 200,
        "streamed": False,
        "request": b'{"messages": []}',
        "response": b'{"choices": []}',
        "prompt_ids": np.array([1, 2, 3], dtype=np.int32),
        "choices": (make_choice(0, [5, 6], [-0.5, -1.25]),),
        "usage": Usage(prompt_tokens=3, completion_tokens=2),
        "fidelity": Fidelity.EXACT,
    }
    return Call(id=id, attempt_id=attempt_id, **(defaults | fields))


def make_choice(
    index: int, ids: list[int], logprobs: list[float], finish_reason: str | None = "stop", versions: Runs = ()
) -> Choice:
    return Choice(
        index=index,
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        finish_reason=finish_reason,
        versions=versions,
    )


def make_rollout(id: str, **fields: Any) -> Rollout:
    task = Task(id=f"task of {id}", fields={"question": "2 + 3?", "n": [1, 2.5, None]})
    return Rollout(id=id, task=task, **({"group_id": "g"} | fields))
