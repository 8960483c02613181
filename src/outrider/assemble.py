"""Puts a run together from its configuration: plug-ins by name, services as processes, and takes it apart again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider import evaluate as measuring
from outrider import learn
from outrider.config import RunConfig, parse
from outrider.data.tasks import load_tasks
from outrider.engines.embedded.weights import resolve_model
from outrider.errors import ConfigError, SetupError
from outrider.executors.local import LocalExecutor
from outrider.gateway.client import GatewayClient
from outrider.keys import split_password
from outrider.memory import MemoryWatch
from outrider.protocols import Backend, Engine, Observer, RewardFunction, Store
from outrider.reconcile import Reconciler
from outrider.registry import resolve
from outrider.rl.advantages import CRITICS
from outrider.runfolder import RunFolder
from outrider.stores import check_url, open_store
from outrider.supervise import Service, Supervisor, free_port, hold_port
from outrider.train import Parts, Progress, Trainer
from outrider.types import Failure, Json, Task

OUTRIDER = (sys.executable, "-m", "outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything of a run that can be checked before a process is started."""

    config: RunConfig
    root: Path
    """Folder of the run file; relative paths start here."""
    tasks: list[Task]
    held_out: list[Task]
    reward: RewardFunction
    executor: LocalExecutor
    folder: RunFolder
    model: Path
    """The model as a Hugging Face folder."""


def check_inputs(config: RunConfig, root: Path, folder: RunFolder, *, training: bool = True) -> Inputs:
    """Read and check what the configuration names, before the run folder is taken. Raises `ConfigError` that names the
    key. A model that has to be converted first is."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))  # modules of the user's lie beside the run file
    tasks = load_tasks(root / config.tasks.train, field="tasks.train")
    held_out = load_tasks(root / config.tasks.eval, field="tasks.eval") if config.tasks.eval else []
    reward = resolve("reward", config.reward.name, field="reward.name", root=root)
    executor = resolve("executor", config.executor.kind, field="executor.kind", root=root)(config.harness, root=root)
    executor.validate()
    for task in (*tasks, *held_out):
        executor.check(task)
    if not held_out and config.eval.limit:
        raise ConfigError("eval.limit: there are no held-out tasks to limit; set tasks.eval.")
    _check_names(config, root, training=training)
    return Inputs(
        config=config,
        root=root,
        tasks=tasks,
        held_out=held_out,
        reward=reward,
        executor=executor,
        folder=folder,
        model=locate_model(config, root),
    )


def _check_names(config: RunConfig, root: Path, *, training: bool) -> None:
    """Names that are needed only once services run, or torch; a wrong one should not wait for that."""
    if training and importlib.util.find_spec("torch") is None:
        raise SetupError(f"training needs torch, which {sys.executable} has not: pip install 'outrider[train]'.")
    resolve("engine", config.engine.kind, field="engine.kind")
    if config.store.url:
        check_url(config.store.url, field="store.url")
    if training:
        learn.check(config.train)
        resolve("sampler", config.train.sampler, field="train.sampler", root=root)
        resolve("backend", config.train.backend, field="train.backend")


def train(inputs: Inputs, observer: Observer, stop: threading.Event) -> Json:
    """Train as configured. Returns what `Trainer.run` returns, with ``peak_rss_bytes``."""
    config, folder, model = inputs.config, inputs.folder, inputs.model
    floor = max((record.get("peak_rss_bytes", 0) for record in folder.records()), default=0)
    latest = folder.latest()
    progress = Progress(policy_version=latest.policy_version if latest else 0)
    with MemoryWatch(floor=floor) as memory, contextlib.ExitStack() as stack:
        run = stack.enter_context(services_running(inputs, model, progress, observer))
        backend = make_backend(config, model)  # takes seconds, while the services come up
        run.supervisor.await_ready()
        store = stack.enter_context(contextlib.closing(open_run_store(config, folder)))
        parts = Parts(
            store=store,
            reconciler=make_reconciler(inputs, store, run, observer, stop),
            backend=backend,
            engine=run.engine_client,
            gateway=run.gateway_client,
            observer=observer,
            folder=folder,
            stop=stop,
            services_up=run.supervisor.wait_up,
            memory=memory,
        )
        sampler = resolve("sampler", config.train.sampler, field="train.sampler", root=inputs.root)(
            inputs.tasks, seed=config.seed, success=config.reward.success
        )
        result = Trainer(config, parts, inputs.tasks, inputs.held_out, progress, sampler).run()
        return result | {"peak_rss_bytes": memory.peak}


def evaluate(inputs: Inputs, observer: Observer, stop: threading.Event) -> Json:
    """Measure the model on the held-out tasks; returns the ``eval`` record, which is also in metrics.jsonl."""
    config, folder = inputs.config, inputs.folder
    began = time.monotonic()
    with MemoryWatch() as memory, contextlib.ExitStack() as stack:
        run = stack.enter_context(services_running(inputs, inputs.model, Progress(), observer))
        run.supervisor.await_ready()
        run.gateway_client.resume(0)  # the store may know of a training run, and these are the weights it began with
        store = stack.enter_context(contextlib.closing(open_run_store(config, folder)))
        reconciler = make_reconciler(inputs, store, run, observer, stop)
        record = measuring.measure(
            "eval",
            config,
            inputs.held_out,
            step=0,
            policy_version=0,
            run=reconciler.run,
            failures=reconciler.take_failures,
            observer=observer,
        )
        record |= {"wall_s": time.monotonic() - began, "peak_rss_bytes": memory.peak}
    folder.append(record)
    observer.record(record)
    return record


@contextlib.contextmanager
def services_running(inputs: Inputs, model: Path, progress: Progress, observer: Observer) -> Iterator[Services]:
    """Start the engine and the gateway of a run; at the end stop them and whatever the executor still runs."""
    services = Services(inputs.config, inputs.folder, model, progress, observer)
    try:
        observer.phase("start services", 0)
        with services.ports_held():
            services.supervisor.start([services.engine(), services.gateway()])
            yield services
    finally:
        inputs.executor.close()
        services.supervisor.close()


def make_reconciler(
    inputs: Inputs, store: Store, run: Services, observer: Observer, stop: threading.Event
) -> Reconciler:
    config = inputs.config
    return Reconciler(
        store=store,
        executor=inputs.executor,
        reward=inputs.reward,
        reward_name=config.reward.name,
        env_for_key=run.env_for_key,
        workdir=inputs.folder.work,
        observer=observer,
        concurrency=config.executor.concurrency,
        max_attempts=config.executor.max_attempts,
        reward_timeout_s=config.reward.timeout_s,
        stop=stop,
        outages=run.supervisor.known_outages,
        check=run.supervisor.check,
        available=run.supervisor.all_up,
    )


def locate_model(config: RunConfig, root: Path) -> Path:
    """The model as a Hugging Face folder. A relative path is looked for beside the run file, then here."""
    beside = root / config.model.path
    return resolve_model(str(beside) if beside.exists() else config.model.path)


class Services:
    """Command lines, addresses and clients of the engine and the gateway of a run."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, model: Path, progress: Progress, observer: Observer
    ) -> None:
        self._config, self._folder, self._model, self._progress = config, folder, model, progress
        self.supervisor = Supervisor(on_restart=observer.message)
        self._admin_key = "ora-" + secrets.token_urlsafe(24)
        host = config.gateway.host
        # Ports are chosen here, since a service that is started again must be found where it was.
        self._engine_port = free_port("127.0.0.1", config.engine.port, "engine.port")
        self._gateway_port = free_port(host, config.gateway.port, "gateway.port")
        self._gateway_url = f"http://{host}:{self._gateway_port}"
        self._engine_url = f"http://127.0.0.1:{self._engine_port}"
        self.engine_client: Engine = resolve("engine", config.engine.kind, field="engine.kind")(self._engine_url)
        self.gateway_client = GatewayClient(self._gateway_url, self._admin_key)

    @contextlib.contextmanager
    def ports_held(self) -> Iterator[None]:
        """Both are kept for the services, while these are down too."""
        with (
            hold_port("127.0.0.1", self._engine_port, "engine.port"),
            hold_port(self._config.gateway.host, self._gateway_port, "gateway.port"),
        ):
            yield

    def env_for_key(self, key: str) -> dict[str, str]:
        """What a harness needs to find its model here: the base URLs that SDKs read, with the key in the path."""
        base = f"{self._gateway_url}/s/{key}"
        return {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": self._config.model.name,
            "ANTHROPIC_BASE_URL": base,
            "ANTHROPIC_API_KEY": key,
        }

    def engine(self) -> Service:
        return Service(
            name=Failure.ENGINE,
            argv=self._engine_argv,
            env={"OMP_WAIT_POLICY": "PASSIVE"},
            log=self._folder.logs / "engine.log",
            wait_ready=self.engine_client.wait_ready,
            start_timeout_s=self._config.engine.start_timeout_s,
        )

    def gateway(self) -> Service:
        config = self._config
        argv = [*OUTRIDER, "gateway", "--host", config.gateway.host, "--port", str(self._gateway_port)]
        url, env = store_url(config, self._folder), {"OUTRIDER_ADMIN_KEY": self._admin_key}
        if url.startswith("postgres"):  # everybody on a machine may read the arguments of a process
            url, password = split_password(url)
            env |= {"PGPASSWORD": password} if password else {}
        argv += ["--upstream", self._engine_url, "--store", url]
        argv += ["--store-synchronous", config.store.synchronous, "--mode", "train"]
        argv += ["--model", config.model.name]  # whatever name the harness asks for, the policy answers
        argv += ["--tokens", config.gateway.tokens, "--tokenizer", str(self._model)]
        argv += ["--forced-tools", config.gateway.forced_tools]
        argv += ["--max-body-mb", str(config.gateway.max_body_mb)]
        # While a collocated step trains, calls wait: an agent that is sent away too often fails, and is graded for it.
        wait_s = str(config.gateway.upstream_timeout_s)
        argv += ["--upstream-timeout-s", wait_s, "--pause-wait-s", wait_s, "--parent-pid", str(os.getpid())]
        return Service(
            name=Failure.GATEWAY,
            argv=lambda: argv,
            env=env,
            log=self._folder.logs / "gateway.log",
            wait_ready=self.gateway_client.wait_ready,
            start_timeout_s=config.gateway.start_timeout_s,
        )

    def _engine_argv(self) -> list[str]:
        engine, version = self._config.engine, self._progress.policy_version
        weights = self._folder.weights_dir(version) if version else self._model
        argv = [*OUTRIDER, "engine", "--model", str(weights), "--name", self._config.model.name]
        argv += ["--port", str(self._engine_port), "--slots", str(engine.slots)]
        argv += ["--max-model-len", str(engine.max_model_len), "--dtype", engine.dtype]
        argv += ["--prefix-cache-tokens", str(engine.prefix_cache_tokens), "--threads", str(engine.threads)]
        argv += ["--seed", str(self._config.seed), "--version", str(version), "--parent-pid", str(os.getpid())]
        return argv


def make_backend(config: RunConfig, model: Path) -> Backend:
    train = config.train
    backend: Backend = resolve("backend", train.backend, field="train.backend")(
        model,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        token_budget=train.token_budget,
        lora_rank=train.lora_rank,
        lora_alpha=train.lora_alpha,
        precision=train.precision,
        value_head=train.critic if train.advantage in CRITICS else "none",
        value_lr_ratio=train.critic_lr / train.lr if train.critic_lr else 1.0,
        share_prefixes=train.share_prefixes,
        attention=train.attention,
        gradient_checkpointing=train.gradient_checkpointing,
        threads=train.threads,
        seed=config.seed,
    )
    return backend


@contextlib.contextmanager
def opened(folder: RunFolder) -> Iterator[Store]:
    """The store of a run that lies in `folder`, for looking at it."""
    file = folder.root / "config.json"
    if not file.exists():
        raise ConfigError(f"{folder.root}: this is no run folder, it has no config.json.")
    with contextlib.closing(open_run_store(parse(json.loads(file.read_text(encoding="utf-8"))), folder)) as store:
        yield store


def tokenizer(folder: RunFolder) -> Callable[[Sequence[int]], list[str]] | None:
    """Turns token ids into one text each, with the run's own tokenizer; None where that cannot be had."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    config = parse(json.loads((folder.root / "config.json").read_text(encoding="utf-8")))
    try:
        file = locate_model(config, folder.root) / "tokenizer.json"
    except ConfigError:
        return None
    if not file.exists():
        return None
    loaded = Tokenizer.from_file(str(file))
    return lambda ids: [loaded.decode([int(token)], skip_special_tokens=False) for token in ids]


def store_url(config: RunConfig, folder: RunFolder) -> str:
    return config.store.url or f"sqlite:///{folder.store_file}"


def open_run_store(config: RunConfig, folder: RunFolder) -> Store:
    return open_store(store_url(config, folder), synchronous=config.store.synchronous)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. A second one leaves at once; the children notice."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        sys.stderr.write("\nStopping cleanly; press Ctrl-C again to stop at once.\n")

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
