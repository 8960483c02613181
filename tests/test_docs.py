"""What README and docs tell people to type exists, and the walk-through is executed as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from fakes.tiny_model import save_tiny
from outrider.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)


def fences(page, language):
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def typed(page):
    """Command lines in fences and in backticks, without variables before them; behind two spaces stands a comment."""
    text = page.read_text()
    lines = [line for _, block in FENCE.findall(text) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [re.split(r"\s{2,}|\s#\s", re.sub(r"^([A-Z_]+=\S+ )+", "", line.strip()))[0] for line in lines]


COMMANDS = sorted(
    {line for page in PAGES for line in typed(page) if re.match(r"(outrider|make|python bench/)\b", line)}
)


def test_there_are_commands_to_check():
    assert {"make quickstart", "make test", "outrider train run.toml"} <= set(COMMANDS)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("outrider")])
def test_outrider_commands_exist_and_take_these_options(line):
    words = [word for word in shlex.split(line)[1:] if word != "…"]
    if not words or words[0].startswith("-"):
        return  # the group's own options; their help is tested in test_cli
    command = main.commands[words[0]]
    # Under its group, as when typed: a command remembers the help option of the first context that it was asked in.
    parent = click.Context(main, info_name="outrider", **main.context_settings)
    with click.Context(command, info_name=words[0], parent=parent, resilient_parsing=True) as context:
        command.make_parser(context).parse_args(words[1:])


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make")])
def test_make_targets_exist(line):
    target = line.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), line


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("python bench/")])
def test_bench_commands_exist(line):
    script = ROOT / line.split()[1]
    assert script.exists()
    options = re.findall(r"--[a-z-]+", line)
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert all(option in result.stdout for option in options)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)  # table["key"](x) is no link
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_the_walk_through_works_as_it_stands(tmp_path):
    page = ROOT / "docs" / "your-agent.md"
    save_tiny(tmp_path)
    (tmp_path / "reward.py").write_text(fences(page, "python")[0])
    (tmp_path / "run.toml").write_text(fences(page, "toml")[0])
    tasks = [fences(page, "json")[0].replace("train-001", f"task-{number}") for number in range(3)]
    (tmp_path / "train.jsonl").write_text("".join(tasks))
    (tmp_path / "heldout.jsonl").write_text("".join(tasks))
    (tmp_path / "agent.py").write_text((ROOT / "examples" / "calc_agent" / "agent.py").read_text())
    commands = [line for line in fences(page, "text")[0].splitlines() if line.startswith("outrider")]
    assert len(commands) == 4
    small = ["-o", f"model.path={tmp_path}", "-o", "train.steps=1", "-o", "train.groups=2", "-o", "train.group_size=2"]
    for line in commands:
        words = shlex.split(line)[1:]
        options = small if words[0] == "train" else []
        result = subprocess.run(
            [sys.executable, "-m", "outrider", *words, *options],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
    assert "step-0001-000-0" in result.stdout or (tmp_path / "runs" / "mine" / "report.html").exists()
