"""A harness that does not exist is told before the run, with where it was looked for."""

import sys

import pytest

from outrider.config import HarnessConfig
from outrider.errors import ConfigError
from outrider.executors.local import LocalExecutor


def validate(root, **config):
    LocalExecutor(HarnessConfig(**config), root=root).validate()


@pytest.fixture
def root(tmp_path):
    (tmp_path / "agent.py").write_text("raise SystemExit('not run by a check')")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "mod.py").write_text("print('noise')\nNAME = 'x'\ndef main(task): raise SystemExit(1)")
    (tmp_path / "broken.py").write_text("1 / 0")
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [
        {"command": ("python", "agent.py", "{q}")},
        {"command": ("python", "-m", "mod")},
        {"command": ("python", "-c", "print('{q}')")},
        {"command": ("sh", "-c", "true")},
        {"command": ("run.sh",)},
        {"command": ("./run.sh",)},
        {"command": ("python", "{script}")},
        {"command": ("{program}",)},
        {"function": "mod:main"},
        {"function": "mod:main", "preload": ("json", "xml.dom", "mod:main")},
    ],
)
def test_what_exists(root, config):
    validate(root, **config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"command": ("python", "agnt.py")}, "harness.command: there is no script {root}/agnt.py."),
        ({"command": ("python", "sub/agent.py")}, "harness.command: there is no script {root}/sub/agent.py."),
        ({"command": ("python", "-m", "modd.x")}, "harness.command: {python} has no module 'modd.x'."),
        ({"command": ("no-such-prog",)}, "harness.command: there is no program 'no-such-prog' that can be executed"),
        ({"command": ("./rn.sh",)}, "harness.command: there is no program '{root}/rn.sh'"),
        ({"command": ("agent.py",)}, "harness.command: there is no program '{root}/agent.py' that can be executed"),
        ({"command": (".venv/bin/python", "agent.py")}, "the interpreter {root}/.venv/bin/python cannot be started"),
        ({"function": "modd:main"}, "harness.function: there is no module 'modd' (looked in {root}"),
        ({"function": "mod:man"}, "harness.function: module 'mod' has no function 'man'."),
        ({"function": "mod:NAME"}, "harness.function: module 'mod' has no function 'NAME'."),
        ({"function": "mod"}, "harness.function: "),
        ({"function": "broken:main"}, "broken:main cannot be imported: ZeroDivisionError"),
        ({"function": "mod:main", "preload": ("opnai",)}, "harness.preload: {python} has no module 'opnai'."),
        ({"command": ("true",), "cwd": "nowhere"}, "harness.cwd: there is no folder {root}/nowhere."),
    ],
)
def test_what_does_not(root, config, said):
    with pytest.raises(ConfigError) as error:
        validate(root, **config)
    assert said.format(root=root, python=sys.executable) in str(error.value)
