"""Services that die, come back, or don't."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from outrider.errors import RunError, SetupError
from outrider.supervise import MAX_RESTARTS, Service, Supervisor, free_port, hold_port
from outrider.types import Failure

SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def make(tmp_path):
    supervisors, ports = [], contextlib.ExitStack()

    def make(code=SERVER, start_timeout_s=60.0):
        port = ports.enter_context(hold_port("127.0.0.1", 0, "test.port"))

        def wait_ready(timeout_s):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=timeout_s).close()
            except (urllib.error.URLError, OSError) as error:
                time.sleep(0.02)
                raise SetupError(str(error)) from None

        service = Service(
            name=Failure.ENGINE,
            argv=lambda: [sys.executable, "-c", code, str(port)],
            env={},
            log=tmp_path / "service.log",
            wait_ready=wait_ready,
            start_timeout_s=start_timeout_s,
        )
        told = []
        supervisor = Supervisor(on_restart=told.append)
        supervisors.append(supervisor)
        return supervisor, service, told

    yield make
    for supervisor in supervisors:
        supervisor.close()
    ports.close()


def test_a_killed_service_comes_back_and_the_outage_is_known(make):
    supervisor, service, told = make()
    supervisor.start([service])
    supervisor.await_ready()
    first = service.process.pid
    killed_at = time.time()
    os.kill(first, signal.SIGKILL)
    until(lambda: supervisor.outages)
    supervisor.wait_up()
    assert service.process.pid != first
    service.wait_ready(1.0)
    outage = supervisor.outages[0]
    assert outage.service is Failure.ENGINE
    assert outage.ended_at >= killed_at
    assert "died (status -9)" in told[0]
    supervisor.check()


def test_closing_stops_the_process(make):
    supervisor, service, _ = make()
    supervisor.start([service])
    supervisor.await_ready()
    supervisor.close()
    assert service.process.poll() is not None
    assert supervisor.outages == []


def test_a_service_that_cannot_start_shows_its_log(make):
    supervisor, service, _ = make(code="raise SystemExit('the model is missing')")
    supervisor.start([service])
    with pytest.raises(SetupError, match="the model is missing"):
        supervisor.await_ready()


def test_a_service_that_never_gets_ready_is_told(make):
    supervisor, service, _ = make(code="import time; time.sleep(600)", start_timeout_s=0.3)
    supervisor.start([service])
    with pytest.raises(SetupError, match=r"not ready after 0\.3 s"):
        supervisor.await_ready()


def test_a_service_that_keeps_dying_breaks_the_run(make):
    supervisor, service, told = make()
    supervisor.start([service])
    supervisor.await_ready()
    killer = threading.Thread(target=lambda: [_kill_next(supervisor, service) for _ in range(MAX_RESTARTS + 1)])
    killer.start()
    until(lambda: supervisor.broken)
    killer.join(60)
    with pytest.raises(RunError, match="can be resumed"):
        supervisor.check()
    with pytest.raises(RunError):
        supervisor.wait_up()
    assert len(told) == MAX_RESTARTS


def _kill_next(supervisor, service):
    before = len(supervisor.outages)
    os.kill(service.process.pid, signal.SIGKILL)
    until(lambda: len(supervisor.outages) > before)


def test_a_port_is_held_while_the_service_is_down():
    with hold_port("127.0.0.1", 0, "gateway.port") as port:
        for _ in range(2):  # the service comes and goes
            with socket.create_server(("127.0.0.1", port)):  # which reuses addresses, as ours do
                socket.create_connection(("127.0.0.1", port), timeout=30).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=30)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_port_in_use_names_the_field():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SetupError, match=r"gateway\.port: cannot listen on 127\.0\.0\.1"):
            free_port("127.0.0.1", taken.getsockname()[1], "gateway.port")
