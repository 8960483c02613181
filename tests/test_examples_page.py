"""The page that walks a rollout to its gradient is executed: each block of text is what the code above it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "rollout_to_gradient.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_does_what_it_says():
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks].count("text") >= 8
    names: dict[str, object] = {}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert printed == text
            printed = ""
            continue
        assert printed == "", f"a block prints what the page does not show: {printed}"
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(compile(text, str(PAGE), "exec"), names)
        printed = stdout.getvalue()
    assert printed == ""
