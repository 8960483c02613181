"""The quickstart: the calculator agent of ``examples/calc_agent``, which the wheel carries along."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outrider.errors import SetupError


def run_file() -> Path:
    """The example's run file: inside an installed package, or in the checkout beside ``src``."""
    if importlib.util.find_spec("openai") is None:
        raise SetupError(
            "the quickstart's agent is written with the openai SDK, which is not installed: "
            "pip install 'outrider[quickstart]'"
        )
    packaged = Path(__file__).parent / "calc_agent" / "run.toml"
    checkout = Path(__file__).parents[3] / "examples" / "calc_agent" / "run.toml"
    for file in (packaged, checkout):
        if file.exists():
            return file
    raise SetupError(f"the calculator example is missing; looked for {packaged} and {checkout}")
