"""The example's own modules, which are no package: loaded from their files."""

import importlib.util
from pathlib import Path

import pytest

CALC_AGENT = Path(__file__).parents[2] / "examples" / "calc_agent"


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"calc_agent_{name}", CALC_AGENT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def calc_agent():
    return CALC_AGENT


@pytest.fixture(scope="session")
def agent():
    return load_example("agent")


@pytest.fixture(scope="session")
def make_tasks():
    return load_example("make_tasks")


@pytest.fixture(scope="session")
def reward():
    return load_example("reward")
