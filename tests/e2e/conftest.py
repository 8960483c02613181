"""Runs on the tiny model."""

import pytest

from fakes.tiny_model import save_tiny
from fakes.tiny_run import write_project


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def project(tmp_path, tiny):
    return write_project(tmp_path, tiny)
