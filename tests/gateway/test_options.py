"""Options from the command line, variables and a file, the nearer one before the farther."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from outrider import cli
from outrider.errors import ConfigError
from outrider.gateway import app
from outrider.gateway.options import GatewayOptions, load_options
from outrider.sections import fields
from outrider.types import Mode

FILE = """
upstream = "http://127.0.0.1:8000"
store = "sqlite:///calls.sqlite3"
mode = "record"
port = 9000
sample_rate = 0.25
redact_patterns = ["proj-[0-9]+"]
upstream_dialects = ["openai_chat", "anthropic_messages"]
grader_key = "sha256:00"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gateway.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def run(monkeypatch):
    """Runs the command and gives the options that the gateway would be started with."""
    served = []
    monkeypatch.setattr(app, "serve", served.append)

    def run(*arguments, env=None):
        result = CliRunner().invoke(cli.main, ["gateway", *map(str, arguments)], env=env or {})
        return served.pop() if served else result

    return run


def test_a_file_has_the_same_keys(file, run):
    for options in (load_options(file, {}), run("--config", file)):
        assert options.mode is Mode.RECORD
        assert (options.port, options.sample_rate) == (9000, 0.25)
        assert options.upstream_dialects == ("openai_chat", "anthropic_messages")
        assert options.redact_patterns == ("proj-[0-9]+",)
        assert options.max_in_flight == GatewayOptions(upstream="x", store="y").max_in_flight


def test_the_command_line_goes_before_variables_and_they_before_the_file(file, run):
    env = {"OUTRIDER_GATEWAY_MODE": "eval", "OUTRIDER_GATEWAY_PORT": "9001", "OUTRIDER_GATEWAY_CONFIG": str(file)}
    options = run("--mode", "train", env=env)
    assert (options.mode, options.port, options.sample_rate) == (Mode.TRAIN, 9001, 0.25)


def test_one_variable_switches_the_mode(file, run):
    for mode in Mode:
        assert run("--config", file, env={"OUTRIDER_GATEWAY_MODE": mode.value}).mode is mode


@pytest.mark.parametrize("name", ["admin_key", "trainer_key", "grader_key", "read_key"])
def test_keys_come_from_short_variables(file, run, name):
    assert getattr(run("--config", file, env={f"OUTRIDER_{name.upper()}": "k"}), name) == "k"


def test_options_with_several_values_are_repeated(file, run):
    options = run("--config", file, "--redact-pattern", "a+", "--redact-pattern", "b+", "--agent-final")
    assert options.redact_patterns == ("a+", "b+")
    assert options.agent_final is True
    env = {"OUTRIDER_GATEWAY_UPSTREAM_DIALECTS": "openai_chat openai_responses"}
    assert run("--config", file, env=env).upstream_dialects == ("openai_chat", "openai_responses")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("prot = 1", "prot: there is no such key. Did you mean port"),
        ("xyzzy = 1", "xyzzy: there is no such key"),
        ("port = 'x'", "port: expected int, got str"),
        ("port = 70000", "port: expected int <= 65535"),
        ("mode = 'recrod'", "mode: 'recrod' is none of passthrough, record"),
        ("sample_rate = 1.5", "sample_rate: expected float <= 1"),
        ("redact = 'yes'", "redact: 'yes' is none of off"),
        ("port", "not valid TOML"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path, text, match):
    path = tmp_path / "g.toml"
    path.write_text(f'upstream = "http://x"\nstore = "sqlite:///x"\n{text}\n')
    with pytest.raises(ConfigError, match=match):
        load_options(path, {})


def test_what_is_missing_is_named(tmp_path, run):
    with pytest.raises(ConfigError, match="upstream: give --upstream"):
        load_options(None, {"store": "sqlite:///x"})
    with pytest.raises(ConfigError, match="store: give --store"):
        load_options(None, {"upstream": "http://x"})
    with pytest.raises(ConfigError, match=r"there is no such file"):
        load_options(tmp_path / "none.toml", {})
    result = run("--upstream", "http://x")
    assert result.exit_code == 2
    assert "store: give --store" in result.output


def test_every_field_says_what_it_is():
    for name, _, meta, _ in fields(GatewayOptions):
        assert meta.description, name
        assert meta.description.endswith("."), name


def test_a_secret_is_not_in_the_repr():
    options = GatewayOptions(upstream="http://me:pw@x", store="y", admin_key="topsecret")
    assert json.dumps(repr(options)).find("topsecret") == repr(options).find("pw") == -1
