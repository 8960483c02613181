"""An executor whose exits are written down beforehand, and what goes with it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np

from outrider.protocols import Exit
from outrider.types import Call, CallState, Fidelity, Rollout, Task

OK = Exit(attempt_id="", exit_code=0, signal=None)


def made(attempt_id, number=0, state=CallState.COMPLETE, status=200, request=None):
    return Call(
        id=f"{attempt_id}-{number}",
        attempt_id=attempt_id,
        dialect="openai_chat",
        model="policy",
        state=state,
        status=status,
        streamed=False,
        request=request or f"request {number}".encode(),
        response=b"{}",
        prompt_ids=np.array([1], np.int32),
        choices=(),
        usage=None,
        fidelity=Fidelity.EXACT,
        started_at=time.time(),
    )


class Script:
    """An executor that ends each attempt as `ends(attempt_id)` says, after recording what the harness did."""

    def __init__(self, store, ends, calls=1):
        self.store, self.ends, self.calls = store, ends, calls
        self.live, self.peak, self.launches, self.stopped = deque(), 0, [], []

    def start(self, launch):
        self.launches.append(launch)
        self.live.append(launch.attempt_id)
        self.peak = max(self.peak, len(self.live))

    def poll(self, timeout_s):
        if not self.live:
            return []
        attempt_id = self.live.popleft()
        exit_ = self.ends(attempt_id)
        for number in range(self.calls):
            self.store.append_call(made(attempt_id, number)).result()
        return [replace(exit_, attempt_id=attempt_id)]

    def stop(self, attempt_id):
        self.stopped.append(attempt_id)

    def hold_time(self, held):
        pass

    def close(self):
        pass


class Listener:
    def __init__(self):
        self.messages, self.ended = [], []

    def phase(self, name, total): ...
    def record(self, record, *, earlier=False): ...

    def advance(self, rollout=None):
        self.ended.append(rollout.id)

    def message(self, text):
        self.messages.append(text)


def rollouts(count=3):
    return [Rollout(id=f"r{i}", task=Task(id=f"t{i}", fields={}), group_id="g") for i in range(count)]
