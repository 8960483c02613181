"""The command line teaches itself, and its documentation is what it prints."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from outrider.cli import main

ROOT = Path(__file__).parents[1]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["cli.md", "config.md"])
def test_generated_pages_are_up_to_date(page):
    generate = load(ROOT / "docs" / "generate.py")
    assert (ROOT / "docs" / page).read_text() == generate.PAGES[page](), "run: python docs/generate.py"


@pytest.mark.parametrize("name", [None, *main.commands])
def test_every_command_and_option_has_help(name):
    result = CliRunner().invoke(main, ["--help"] if name is None else [name, "--help"])
    assert result.exit_code == 0
    command = main if name is None else main.commands[name]
    assert command.help
    for option in command.params:
        if isinstance(option, click.Option) and option.type.name != "choice":
            assert option.help, f"{name} --{option.name} has no help"


def outrider(*args, cwd, **env):
    return subprocess.run(
        [sys.executable, "-m", "outrider", *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


RUN = """
[tasks]
train = "tasks.jsonl"
[harness]
command = ["python", "agent.py", "{question}"]
[reward]
name = "exact_match"
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "tasks.jsonl").write_text('{"id": 1, "question": "?", "answer": "!"}\n')
    (tmp_path / "agent.py").write_text("print('hello')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "options", "said"),
    [
        ("run.toml", None, (), "run.toml: there is no such run file"),
        ("tasks.jsonl", '{"id": 1}\n{"id": 2,\n', (), "line 2"),
        ("tasks.jsonl", '{"id": 1}\n', (), "{question} is no field of task '1'"),
        ("tasks.jsonl", None, (), "tasks.train: there is no file"),
        ("agent.py", None, (), "harness.command: there is no script"),
        (None, None, ("-o", 'harness.command=["no-such-agent"]'), "no program 'no-such-agent'"),
        (None, None, ("-o", "reward.name=exact_mach"), "Did you mean 'exact_match'?"),
        (None, None, ("-o", "train.stpes=3"), "Did you mean train.steps?"),
        (None, None, ("-o", "model.path=nowhere.gguf"), "nowhere.gguf"),
        (None, None, ("-o", "model.path=package:not_there"), "not_there"),
        (None, None, ("-o", "train.advantage=grop"), "train.advantage: there is no 'grop'"),
        (None, None, ("-o", "train.sampler=shufle"), "Did you mean 'shuffle'?"),
        (None, None, ("-o", "engine.kind=vllm"), "engine.kind: no engine called 'vllm'"),
        (None, None, ("-o", "train.backend=verl"), "train.backend: no backend called 'verl'"),
        (None, None, ("-o", "store.url=runs"), "store.url: 'runs' is no store URL"),
    ],
)
def test_bad_input_is_told_before_anything_is_started(project, file, text, options, said):
    if file is not None:
        (project / file).unlink()
        if text is not None:
            (project / file).write_text(text)
    result = outrider("train", "run.toml", *options, cwd=project)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "goes on from there" not in result.stderr
    assert not (project / "runs" / "default" / "config.json").exists()  # a mended command finds nothing in its way


def test_the_gateway_starts_without_torch(tmp_path):
    code = "import sys, outrider.cli, outrider.gateway.app; assert 'torch' not in sys.modules, 'torch was imported'"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_inspect_needs_a_run_folder(tmp_path):
    result = outrider("inspect", str(tmp_path), cwd=tmp_path)
    assert result.returncode == 2
    assert "no run folder" in result.stderr


def test_doctor_says_what_can_be_run(tmp_path):
    result = outrider("doctor", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "quickstart" in result.stdout


def test_training_without_torch_says_what_to_install(project):
    hide = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n == 'torch' else find(n)"
    code = hide + "\nfrom outrider.cli import main; main(['train', 'run.toml'])"
    result = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert "pip install 'outrider[train]'" in result.stderr
