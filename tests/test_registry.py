"""Plug-ins by name: the message tells which of name, module, attribute or package is missing."""

import importlib
import subprocess
import sys

import pytest

from outrider.errors import ConfigError
from outrider.registry import BUILTIN, load_attr, resolve


@pytest.mark.parametrize("target", [target for kind in BUILTIN.values() for target in kind.values()])
def test_every_built_in_name_exists(target):
    assert load_attr(target, field="test") is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact_mach", "Did you mean 'exact_match'?"),
        ("nowhere.at_all:f", "no module 'nowhere.at_all'"),
        ("math:sqroot", "Did you mean 'sqrt'?"),
        ("math:", "package.module:attribute"),
    ],
)
def test_mistakes_are_told(name, said):
    with pytest.raises(ConfigError) as error:
        resolve("reward", name, field="reward.name")
    assert said in str(error.value)
    assert str(error.value).startswith("reward.name:")


def test_a_module_beside_the_run_file_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_reward_module.py").write_text("def score(episode):\n    return 1.0\n")
    monkeypatch.setattr("sys.path", list(importlib.sys.path))
    assert resolve("reward", "my_reward_module:score", field="reward.name", root=tmp_path)(None) == 1.0


def test_a_module_that_lacks_a_package_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.setattr("sys.path", list(importlib.sys.path))
    with pytest.raises(ConfigError, match="'a_package_that_is_not_there', which is not installed"):
        resolve("reward", "needs_more:f", field="reward.name", root=tmp_path)


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("outrider.renderers.template", "jinja2", "render"), ("outrider.backends.torch", "torch", "train")],
)
def test_a_package_that_is_missing_names_its_extra(module, package, extra):
    """In a process of its own, since here both are imported."""
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from outrider.registry import load_attr\n"
        f"try:\n    load_attr('{module}:x', field='f')\n"
        "except Exception as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert f"'{package}'" in told
    assert f"pip install 'outrider[{extra}]'" in told
