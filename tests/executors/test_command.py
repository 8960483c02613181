"""What can be said about a harness before anything runs."""

import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import HarnessConfig
from outrider.errors import ConfigError
from outrider.executors.command import Command, fill
from outrider.types import Task


def task(**fields):
    return Task(id="t7", fields=fields)


def kind(root, *command, **config):
    return Command(HarnessConfig(command=command, **config), root).kind


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "agent.py"), "script"),
        (("python3", "sub/agent"), "script"),
        (("/usr/bin/python3.12", "missing.py"), "script"),
        (("python", "-m", "pkg"), "module"),
        (("python", "-c", "1"), "code"),
        (("python",), "program"),
        (("python", "-m"), "program"),
        (("python", "-u", "agent.py"), "program"),
        (("python", "folder"), "program"),
        (("python", "app.pyz"), "program"),
        (("python-argcomplete", "x"), "program"),
        (("node", "agent.js"), "program"),
        ((), "function"),
    ],
)
def test_kinds(tmp_path, command, expected):
    (tmp_path / "folder").mkdir()
    assert kind(tmp_path, *command, function="" if command else "a:b") == expected


def test_plain_python_is_ours_and_a_path_is_the_harness_s(tmp_path):
    def interpreter(*command):
        return Command(HarnessConfig(command=command), tmp_path).interpreter

    assert interpreter("python", "a.py") == interpreter("python3", "a.py") == sys.executable
    assert interpreter("venv/bin/python", "a.py") == str(tmp_path / "venv/bin/python")
    assert interpreter("/opt/bin/python3.12", "a.py") == "/opt/bin/python3.12"
    assert interpreter("node", "a.js") == sys.executable


def test_words_that_name_files_beside_the_run_file(tmp_path):
    for name in ("agent.js", "conf.toml"):
        (tmp_path / name).touch()
    (tmp_path / "src").mkdir()
    words = ("node", "agent.js", "--config", "conf.toml", "src", "{q}", "x" * 300)
    argv = Command(HarnessConfig(command=words), tmp_path).job(task(q="agent.js"), workdir=tmp_path / "w", env={})[
        "argv"
    ]
    assert argv == ["node", f"{tmp_path}/agent.js", "--config", f"{tmp_path}/conf.toml", "src", "agent.js", "x" * 300]


def test_words_keep_their_meaning_in_a_working_directory(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.txt").touch()
    job = Command(HarnessConfig(command=("cat", "a.txt"), cwd="app"), tmp_path).job(task(), workdir=tmp_path, env={})
    assert (job["argv"], job["cwd"]) == (["cat", "a.txt"], str(tmp_path / "app"))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{q}", "what?"),
        ("a{q}b{n}", "awhat?b3"),
        ("{{q}}", "{q}"),
        ("{{{q}}}", "{what?}"),
        ("", ""),
        ("{none}", "None"),
    ],
)
def test_fields_are_filled_in(text, filled):
    assert fill(text, task(q="what?", n=3, none=None), "harness.command") == filled


@given(st.text(alphabet=string.printable + "{}é", max_size=40), st.text(st.characters(exclude_characters="\0")))
def test_a_value_stays_what_it_is(literal, value):
    escaped = literal.replace("{", "{{").replace("}", "}}")
    assert fill(f"{escaped}{{q}}", task(q=value), "harness.stdin") == literal + value


@pytest.mark.parametrize("text", ["{answer}", "{q.__class__}", "{q!r}", "{q:>10}", "{}", "{0}", "{q", "}"])
def test_a_wrong_placeholder_names_key_field_and_task(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        Command(HarnessConfig(command=("python", text)), tmp_path).check(task(q="x"))
    assert str(error.value).startswith("harness.command: ")
    if "answer" in text:
        assert "'t7'" in str(error.value)
        assert "has: q" in str(error.value)


def test_the_key_of_a_wrong_stdin(tmp_path):
    with pytest.raises(ConfigError, match=r"^harness\.stdin: \{a\} is no field"):
        Command(HarnessConfig(command=("cat",), stdin="{a}"), tmp_path).check(task(q="x"))


def test_a_nul_character_is_told_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="NUL"):
        Command(HarnessConfig(command=("echo", "{q}")), tmp_path).check(task(q="a\0b"))
