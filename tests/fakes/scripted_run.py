"""A whole trainer without processes or a model: agents, engine, gateway and backend are scripts, the rest is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from fakes.calls import call, choice
from fakes.memory_store import MemoryStore
from outrider.config import parse
from outrider.errors import EngineError
from outrider.protocols import Exit, OptimStats, Sampler, StepStats
from outrider.reconcile import Reconciler
from outrider.runfolder import RunFolder
from outrider.samplers.shuffle import Shuffle
from outrider.train import Parts, Progress, Trainer
from outrider.types import Call, Rollout, Runs, Task

OK = Exit(attempt_id="", exit_code=0, signal=None)
LOST = replace(OK, exit_code=None, lost=True)


@dataclass
class Gateway:
    """Knows the policy version, as calls are recorded with it."""

    version: int = 0
    paused: bool = False
    log: list[str] = field(default_factory=list)

    def pause(self, timeout_s: float) -> int:
        self.paused = True
        self.log.append("pause")
        return 0

    def resume(self, version: int) -> None:
        self.version, self.paused = version, False
        self.log.append(f"resume {version}")


@dataclass
class Engine:
    """`failing` publishes fail before one succeeds."""

    served: int = 0
    failing: int = 0
    loads: int = 0
    base_url: str = "http://engine"

    def load_weights(self, path: Path, version: int) -> None:
        self.loads += 1
        if self.failing:
            self.failing -= 1
            raise EngineError("bucket 2 of 2 was refused")
        self.served = version

    def version(self) -> int:
        return self.served


@dataclass
class Backend:
    """Its weights are a number that each update adds 1 to."""

    weights: int = 0
    batches: list = field(default_factory=list)

    def forward_backward(self, rows, loss) -> StepStats:
        self.batches.append(list(rows))
        return StepStats(
            loss=0.5,
            tokens=sum(int(row.sample.loss_mask.sum()) for row in rows),
            tokens_computed=sum(len(row.sample.token_ids) for row in rows),
            ratio_mean=1.0,
            clip_fraction=0.0,
            entropy=1.0,
            kl_behaviour=0.0,
            kl_reference=0.0,
            logprob_diff_mean=0.0,
            logprob_diff_max=0.0,
        )

    def optim_step(self, lr: float) -> OptimStats:
        self.weights += 1
        return OptimStats(grad_norm=1.0, lr=lr)

    def publish(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "weights").write_text(str(self.weights))
        return directory

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "state").write_text(str(self.weights))

    def load(self, directory: Path) -> None:
        self.weights = int((directory / "state").read_text())


class Agents:
    """An executor: each attempt makes `turns(attempt_id)` calls, one a poll, and then ends as `ends(attempt_id)` says.

    While the gateway is paused nobody gets on.
    """

    def __init__(self, store: MemoryStore, gateway: Gateway) -> None:
        self.store, self.gateway = store, gateway
        self.turns: Callable[[str], int] = lambda attempt_id: 1
        self.ends: Callable[[str], Exit] = lambda attempt_id: OK
        self.live: dict[str, int] = {}
        self.made = 0
        self.held = False

    def start(self, launch) -> None:
        self.live[launch.attempt_id] = 0

    def poll(self, timeout_s: float) -> list[Exit]:
        if self.gateway.paused:
            return []
        ended = []
        for attempt_id in list(self.live):
            self.live[attempt_id] += 1
            self.call(attempt_id)
            if self.live[attempt_id] >= self.turns(attempt_id):
                del self.live[attempt_id]
                ended.append(replace(self.ends(attempt_id), attempt_id=attempt_id))
        return ended

    def call(self, attempt_id: str, *, started_under: int | None = None, versions: Runs = ()) -> Call:
        """The attempt's next call, of two tokens: its prompt goes on from the last one."""
        earlier = self.store.calls(attempt_id)
        prompt = [1, 2]
        if earlier:
            prompt = [*earlier[-1].prompt_ids.tolist(), *earlier[-1].choices[0].token_ids.tolist(), 3]
        self.made += 1
        version = self.gateway.version
        made = call(
            prompt,
            choice([10 + self.made, 4], versions=versions),
            id=f"{attempt_id}-{len(earlier)}",
            attempt_id=attempt_id,
            request=f"request {self.made}".encode(),
            version_start=version if started_under is None else started_under,
            version_end=version,
        )
        self.store.append_call(made).result()
        return made

    def stop(self, attempt_id: str) -> None:
        self.live.pop(attempt_id, None)

    def hold_time(self, held: bool) -> None:
        self.held = held

    def close(self) -> None:
        self.live.clear()


class Listener:
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.new: list[str | int] = []
        """Steps and evaluations that were recorded, by number and name."""
        self.earlier: list[str | int] = []
        """The same of an earlier start."""

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, rollout: Rollout | None = None) -> None: ...

    def record(self, record, *, earlier: bool = False) -> None:
        (self.earlier if earlier else self.new).append(record.get("name", record["step"]))

    def message(self, text: str) -> None:
        self.messages.append(text)


class Run:
    """One run folder and what works in it. `again` is a new life of the same run."""

    def __init__(self, root: Path, reward, *, store=None, backend=None, tasks: int = 4, **train) -> None:
        self.root, self.reward, self.train, self.task_count = root, reward, train, tasks
        self.store = store or MemoryStore()
        self.gateway, self.engine, self.backend = Gateway(), Engine(), backend or Backend()
        self.agents = Agents(self.store, self.gateway)
        self.listener = Listener()
        self.sampler: type[Sampler] = Shuffle
        self.services_up: Callable[[], None] = lambda: None
        evaluation = {key.removeprefix("eval_"): train.pop(key) for key in list(train) if key.startswith("eval_")}
        settings = {"steps": 2, "groups": 2, "group_size": 2, "warmup_steps": 0} | train
        tree = {
            "tasks": {"train": "tasks.jsonl"},
            "harness": {"command": ["agent"]},
            "train": settings,
            "eval": {"samples": 0} | evaluation,
        }
        self.config = parse(tree)
        self.folder = RunFolder(root)
        self.progress = Progress()

    def trainer(self, held_out: Sequence[Task] = ()) -> Trainer:
        tasks = [Task(id=f"t{i}", fields={}) for i in range(self.task_count)]
        stop = threading.Event()
        reconciler = Reconciler(
            store=self.store,
            executor=self.agents,
            reward=self.reward,
            reward_name="scripted",
            env_for_key=lambda key: {},
            workdir=self.root / "work",
            observer=self.listener,
            concurrency=64,
            max_attempts=3,
            reward_timeout_s=30.0,
            stop=stop,
        )
        parts = Parts(
            store=self.store,
            reconciler=reconciler,
            backend=self.backend,
            engine=self.engine,
            gateway=self.gateway,
            observer=self.listener,
            folder=self.folder,
            stop=stop,
            services_up=self.services_up,
            memory=SimpleNamespace(peak=1),
        )
        sampler = self.sampler(tasks, seed=0, success=1.0)
        return Trainer(self.config, parts, tasks, held_out, self.progress, sampler)

    def __call__(self, held_out: Sequence[Task] = ()):
        with self.folder:
            return self.trainer(held_out).run()

    def steps(self):
        return [record for record in self.folder.records() if record["kind"] == "step"]

    def trained(self, step: int) -> dict[str, np.ndarray]:
        """Trained ids by attempt, of the batch of update number `step`, from 0."""
        return {row.sample.attempt_id: row.sample.token_ids[row.sample.loss_mask] for row in self.backend.batches[step]}
