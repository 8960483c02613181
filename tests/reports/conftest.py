"""Puts this folder on the path, so that tests can import `fabricate` beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"
