"""A tiny random model with a byte-level tokenizer, and servers that run in a thread of the test process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from transformers import PreTrainedTokenizerFast

from fakes.tiny_model import save_model, save_tiny, save_tokenizer, tiny_config
from outrider.engines.embedded.client import EmbeddedEngine
from outrider.engines.embedded.server import EngineOptions, build


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return save_tokenizer


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    return save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other_weights(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    return save_model(tmp_path_factory.mktemp("other"), tiny_config(vocabulary), seed=1)


@dataclass
class Running:
    """A server under test."""

    url: str
    http: httpx.Client
    control: EmbeddedEngine

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.http.post(route, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, return_token_ids=True, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def stream(self, route: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with ``[DONE]``."""
        with self.http.stream("POST", route, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


StartEngine = Callable[..., Running]


@pytest.fixture(scope="module")
def start_engine(tiny: Path) -> Iterator[StartEngine]:
    """Starts servers on the tiny model (or another) in float32; they stop when the module's tests are done."""
    stops: list[Callable[[], None]] = []

    def start(**options: Any) -> Running:
        values = {"model": str(tiny), "dtype": "float32", "slots": 8, "max_model_len": 256, **options}
        app, scheduler, _ = build(EngineOptions(**values))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        control = EmbeddedEngine(url)
        control.wait_ready(60)
        client = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))

        def stop() -> None:
            client.close()
            server.should_exit = True
            scheduler.close()
            thread.join(60)
            listener.close()
            assert not thread.is_alive()

        stops.append(stop)
        return Running(url=url, http=client, control=control)

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Running:
    """One server for the tests of a module that leave it as they found it."""
    return start_engine()
