"""The engine as a process: start, ready line, ends, and what its client says of a start that fails."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.engines.embedded.client import EmbeddedEngine
from outrider.engines.embedded.server import EngineOptions, serve
from outrider.errors import ConfigError, EngineError, SetupError

START = "from outrider.engines.embedded.server import EngineOptions, serve; serve(EngineOptions({}))"
PATIENCE_S = 120.0


def spawn(log: Path, model: Path, **options) -> subprocess.Popen:
    values = {"model": str(model), "dtype": "float32", "slots": 2, "max_model_len": 64, **options}
    code = START.format(", ".join(f"{name}={value!r}" for name, value in values.items()))
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, "-c", code], stderr=file, stdout=file)


def ready_url(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"ready on (http://\S+) ", log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def test_a_signal_ends_it_cleanly_even_amid_a_stream(tiny, tmp_path):
    log = tmp_path / "log"
    process = spawn(log, tiny, max_model_len=512, slots=1, version=2)
    try:
        url = ready_url(process, log)
        engine = EmbeddedEngine(url)
        engine.wait_ready(PATIENCE_S)
        assert engine.version() == 2
        body = b'{"prompt": [1, 2], "max_tokens": 500, "n": 100, "stream": true, "ignore_eos": true}'
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            received = client.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            while part := client.recv(1 << 16):
                received += part
        assert b"shutting down" in received[-2000:]
        assert b"[DONE]" not in received
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert len(log.read_text().splitlines()) == 1  # the ready line, and nothing else


def test_it_ends_with_its_parent(tiny, tmp_path):
    """A parent that is killed cannot say goodbye; the engine notices by itself."""
    log, pid_file = tmp_path / "log", tmp_path / "pid"
    start = START.format(f"model={str(tiny)!r}, dtype='float32', max_model_len=64, parent_pid=os.getppid()")
    parent_code = (
        "import subprocess, sys, time\n"
        f"log = open({str(log)!r}, 'wb')\n"
        f"child = subprocess.Popen([sys.executable, '-c', {'import os;' + start!r}], stderr=log)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (pid_file.exists() and pid_file.read_text() and log.exists() and "ready" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        engine = EmbeddedEngine(re.search(r"ready on (http://\S+) ", log.read_text())[1])
        assert engine.version() == 0
    finally:
        parent.kill()
        parent.wait()
    while True:
        try:
            engine.version()
        except EngineError:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve(EngineOptions(model="not looked at", port=port))


@pytest.mark.parametrize("options", [{"slots": 0}, {"max_model_len": 1}, {"threads": -1}, {"dtype": "int4"}])
def test_a_bad_option_is_named(options):
    with pytest.raises(ConfigError, match=f"engine.{next(iter(options))}"):
        serve(EngineOptions(model="x", **options))


def test_a_missing_model_says_what_was_looked_for():
    with pytest.raises(ConfigError, match="'no/such/model' was not found"):
        serve(EngineOptions(model="no/such/model"))


@pytest.mark.parametrize("module", ["client", "server"])
def test_importing_it_needs_no_torch(module):
    code = f"import sys, outrider.engines.embedded.{module}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_a_start_that_fails_shows_the_last_lines(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("".join(f"line {i}\n" for i in range(40)))
    engine = EmbeddedEngine("http://127.0.0.1:9", log=log, exit_code=lambda: 3)
    with pytest.raises(SetupError, match=r"ended with status 3(.|\n)*line 25\n(.|\n)*line 39$") as caught:
        engine.wait_ready(10)
    assert "line 24\n" not in str(caught.value)


def test_a_start_that_takes_too_long_is_given_up():
    with pytest.raises(SetupError, match=r"not ready within 0\.2 s"):
        EmbeddedEngine("http://127.0.0.1:9").wait_ready(0.2)


def test_the_client_takes_the_address_with_or_without_v1():
    assert EmbeddedEngine("http://h:1/v1/").base_url == EmbeddedEngine("http://h:1").base_url == "http://h:1"


def test_an_engine_that_is_gone_is_an_engine_error():
    with pytest.raises(EngineError, match="GET /control/version: no usable answer"):
        EmbeddedEngine("http://127.0.0.1:9").version()
