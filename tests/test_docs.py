"""What README and docs tell people to type exists and is executed, as it stands but for its size."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import click
import pytest

from fakes.records import make_call
from fakes.tiny_model import save_model, save_tokenizer, tiny_config
from outrider.cli import main
from outrider.stores import open_store

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
    {line for page in PAGES for line in typed(page) if re.match(r"(outrider|make)( |$)|python bench/", line)}
)
WHOLE = [line for line in COMMANDS if line.startswith("outrider ") and len(line.split()) > 2]  # not a mere name
SMALL = ["train.steps=1", "train.groups=2", "train.group_size=2", "eval.limit=1"]
NOT_IN_CI = {
    "make harnesses": "installs 5 GB; before a release",
    "make bench": "measures for an hour",
    "make test-fast": "a part of make test",
}
POSTGRES = "postgresql://user@db/outrider"
ELSEWHERE = {
    "outrider --help": "test_cli",
    f"outrider gateway --host 0.0.0.0 --upstream http://engine:8000 --store {POSTGRES} --mode train": "test_several",
    "outrider gateway --upstream https://api.anthropic.com --upstream-dialect anthropic_messages …": "only a part",
}


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


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make")])
def test_make_targets_run_in_ci(line):
    target = " ".join(line.split()[:2])
    assert target in NOT_IN_CI or re.search(rf"^{target}\b", (ROOT / ".ci" / "run").read_text(), re.M), line


def test_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sources = [*PAGES, *(ROOT / "src").rglob("*.py")]
    named = {
        (page.name, extra)
        for page in sources
        for extra in re.findall(r"(?:outrider|'\.)\[([a-z]+)\]", page.read_text())
    }
    assert {extra for _, extra in named} >= {"train", "quickstart", "export"}
    assert [one for one in sorted(named) if one[1] not in project["optional-dependencies"]] == []


def test_figures_in_the_readme_are_those_of_the_results():
    text, results = (ROOT / "README.md").read_text(), (ROOT / "bench" / "RESULTS.md").read_text()
    measured = text[text.index("That is `report.png`") : text.index("Figures are those of")]
    figures = re.findall(
        r"(?<![\w.])\d+(?:[.,]\d+)*%?(?!\w)", re.sub(r"\d+ (estimators|losses|corrections|more)", "", measured)
    )
    assert len(figures) > 15
    assert [one for one in figures if one not in results] == []


# -- a folder in which the commands are typed --------------------------------------------------------------------------


class Shell:
    """Runs what the docs say, with a tiny model and few rollouts, and remembers it."""

    def __init__(self, folder, model):
        self.folder, self.model, self.done = folder, model, set()
        self.env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
        (folder / "bin").mkdir()
        for name, words in (("outrider", "-m outrider"), ("python", "")):
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            script.chmod(0o755)

    def run(self, line, *options):
        """One line, to its end. The model is the tiny one, where the line names no other."""
        if re.match(r"outrider (train|eval) ", line):
            more = [*SMALL, *options]
            more += [] if "model.path=" in line else [f"model.path={self.model}"]
            options = [word for one in more for word in ("-o", one)]
        result = subprocess.run(
            [*shlex.split(line), *options],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        self.done.add(line)
        return result.stdout

    @contextlib.contextmanager
    def serving(self, line, *options, **env):
        """One line that serves until it is told to stop; yields its address."""
        words = [*shlex.split(line), "--port", "0", *options]
        process = subprocess.Popen(words, cwd=self.folder, env=self.env | env, stderr=subprocess.PIPE, text=True)
        try:
            said = process.stderr.readline()
            assert "ready on http://" in said, said + process.stderr.read()
            yield re.search(r"ready on (http://[^\s;]+)", said)[1].replace("0.0.0.0", "127.0.0.1")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()
            process.communicate()
        self.done.add(line)


@pytest.fixture
def shell(tmp_path):
    """With room for a prompt of a thousand bytes, each of which is a token."""
    model = tmp_path / "tiny"
    tokenizer = save_tokenizer(model)
    save_model(model, tiny_config(len(tokenizer) + 4, max_position_embeddings=4096))
    return Shell(tmp_path, model)


UNEVEN = """
from outrider.types import Score
from reward import {name} as page


def reward(episode):
    # A random model earns nothing, and equal rewards teach nothing.
    score = page(episode)
    number = int(episode.attempt.rollout_id[-1]) if episode.attempt.rollout_id[-1].isdigit() else 0
    return Score(value=score.value + number / 10, reason=score.reason)
"""


def block(page, language, starts):
    """Lines of the one fence that has a line which starts so."""
    (found,) = [text for text in fences(page, language) if re.search(rf"^{re.escape(starts)}", text, re.M)]
    return found


@pytest.mark.slow
def test_your_agent_works_as_it_stands(shell):
    page, folder = ROOT / "docs" / "your-agent.md", shell.folder
    files = {
        "agent.py": block(page, "python", "from openai"),
        "agent_anthropic.py": block(page, "python", "from anthropic"),
        "reward.py": block(page, "python", "def reward"),
        "uneven.py": UNEVEN.format(name="reward"),
        "train.jsonl": block(page, "json", '{"id": "apple"'),
        "heldout.jsonl": block(page, "json", '{"id": "plum"'),
        "run.toml": block(page, "toml", "[harness]"),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    uneven = "reward.name=uneven:reward"
    for line in block(page, "text", "outrider train").splitlines():
        shell.run(line, *([uneven] if line.startswith(("outrider train", "outrider eval")) else []))
    assert (folder / "runs" / "clerk" / "report.html").exists()
    shell.run("outrider drift runs/clerk")

    served, asked = block(page, "text", "outrider engine").splitlines()
    with shell.serving(served) as address:
        env = dict(word.split("=", 1) for word in shlex.split(asked) if re.match(r"[A-Z_]+=", word))
        shell.env |= env | {"OPENAI_BASE_URL": f"{address}/v1"}
        shell.run(asked[asked.index("python ") :])

    # The clerk finds its price in either dialect, once a model calls the tool.
    anthropic = ["harness.command=" + '["python", "agent_anthropic.py", "{question}"]', 'harness.preload=["anthropic"]']
    shell.run("outrider train run.toml", "out=runs/anthropic", uneven, *anthropic)
    listed = shell.run("outrider inspect runs/anthropic step-0001-000-0")
    assert "anthropic_messages" in listed
    assert "exact" in listed


@pytest.mark.slow
def test_the_readme_and_looking_at_runs_work_as_they_stand(shell):
    (shell.folder / "examples").symlink_to(ROOT / "examples")
    lines = [line for line in typed(ROOT / "README.md") if line in WHOLE]
    (shell.folder / "uneven.py").write_text(UNEVEN.format(name="score"))
    shell.env["PYTHONPATH"] = os.pathsep.join([str(shell.folder), *sys.path])
    for line in lines:
        if line.startswith("outrider engine"):
            with shell.serving(line) as address, urllib.request.urlopen(f"{address}/health") as answer:
                assert answer.status == 200
        else:
            fits = ["reward.name=uneven:reward", "engine.max_model_len=2048", "train.max_tokens=2048"]
            shell.run(line, *(fits if re.match("outrider (train|eval) ", line) else []))
    (shell.folder / "runs" / "mine").symlink_to(shell.folder / "runs" / "calc")
    for line in WHOLE:
        if re.match("outrider (drift|inspect|report) runs/mine", line):
            shell.run(line)
    assert shell.done >= {line for line in lines if len(line.split()) > 2}


@pytest.mark.slow
def test_commands_on_a_store_work_as_they_stand(shell):
    url = f"sqlite:///{shell.folder}/calls.sqlite3"
    with contextlib.closing(open_store(url)) as store:
        store.append_call(make_call("first")).result(timeout=60)
    lines = [line for line in WHOLE if re.match("outrider (export|prune|backup)", line)]
    assert len(lines) >= 6
    for line in lines:
        shell.run(line)


@pytest.mark.slow
def test_gateways_start_as_the_docs_start_them(shell):
    lines = [line for line in WHOLE if line.startswith("outrider gateway") and line not in ELSEWHERE]
    assert len(lines) >= 5
    for number, line in enumerate(lines):
        store = f"sqlite:///{shell.folder}/calls-{number}.sqlite3"
        here = line.replace("FOLDER", str(shell.model)).replace("sqlite:///calls.sqlite3", store)
        with (
            shell.serving(here, OUTRIDER_ADMIN_KEY="ora-secret-0123456789abc") as url,
            urllib.request.urlopen(f"{url}/health") as answer,
        ):
            assert answer.status == 200


def test_every_command_is_executed_somewhere():
    """By one of the tests above, in CI, or for a reason that is given here."""
    clerk = {line for line in typed(ROOT / "docs" / "your-agent.md") if line in WHOLE}
    readme = {line for line in typed(ROOT / "README.md") if line in WHOLE}
    patterns = [
        "outrider (drift|inspect|report) runs/mine",
        "outrider (export|prune|backup) sqlite",
        "outrider gateway ",
    ]
    left = [
        line
        for line in WHOLE
        if line not in clerk | readme and line not in ELSEWHERE and not any(re.match(p, line) for p in patterns)
    ]
    assert left in ([], ["outrider engine --model FOLDER"])
    assert set(ELSEWHERE) <= set(COMMANDS)
    assert set(NOT_IN_CI) <= set(COMMANDS)
