"""A whole run in a folder, on the tiny model: agent, tasks, reward, run file, and the command that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

AGENT = """
import sys
from openai import OpenAI

client = OpenAI()
reply = client.chat.completions.create(
    model="policy", messages=[{"role": "user", "content": sys.argv[1]}], max_tokens=8
)
print(reply.choices[0].message.content)
"""
REWARD = "def even(episode):\n    return float(len(episode.attempt.stdout_tail) % 2)\n"
RUN = """
[model]
path = "tiny"
[tasks]
train = "tasks.jsonl"
eval = "tasks.jsonl"
[harness]
command = ["python", "agent.py", "{question}"]
preload = ["openai"]
timeout_s = 60
[reward]
name = "odd_or_even:even"
[engine]
max_model_len = 128
[eval]
limit = 2
[train]
steps = 2
groups = 2
group_size = 4
lr = 1e-3
"""
TIMEOUT_S = 300


def write_project(folder: Path, model: Path) -> Path:
    """Everything that `start` needs, in `folder`."""
    (folder / "tiny").symlink_to(model)
    (folder / "run.toml").write_text(RUN)
    (folder / "agent.py").write_text(AGENT)
    (folder / "odd_or_even.py").write_text(REWARD)
    tasks = [{"id": i, "question": f"question number {i}"} for i in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return folder


def start(
    project: Path, *overrides: str, command: str = "train", preexec: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    """`outrider train`, or another command, in the project; its run folder is ``run``."""
    options = [part for override in overrides for part in ("-o", override)]
    return subprocess.Popen(
        [sys.executable, "-m", "outrider", command, "run.toml", "-o", f"out={project / 'run'}", *options],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=preexec,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status and what was printed, which must hold no traceback."""
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert "Traceback" not in output, output
    return process.returncode, output
