"""What is wrong with a gateway's options is told at its start, with the name of the option and what to do."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from outrider import cli_gateway
from outrider.cli import main
from outrider.errors import ConfigError
from outrider.gateway.options import GatewayOptions, check_options, load_options
from outrider.gateway.upstreams.upstream import read_base_url
from outrider.types import Mode

GIVEN = {"upstream": "http://127.0.0.1:9", "store": "sqlite:///x"}
LONG = "k7Gq0zYw2LrXv5TnBs9Hd3Fm"


def told(tmp_path, text):
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as found:
        load_options(file, GIVEN)
    return str(found.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('mode = "trian"', "mode: 'trian' is none of passthrough, record, train, eval."),
        ('redact = "none"', "redact: 'none' is none of off, record, all."),
        ('mod = "train"', "mod: there is no such key. Did you mean mode?"),
        ('[gateway]\nmode = "train"', "gateway: there is no such key. Keys stand at the top of the file"),
        ("max_body_mb = inf", "max_body_mb: expected float <= 1048576.0"),
        ("max_body_mb = -1", "max_body_mb: expected float > 0.0"),
        ('dialects = "openai_chat"', "dialects: expected array, got str"),
    ],
)
def test_a_file_with_something_wrong(tmp_path, text, words):
    assert words in told(tmp_path, text)


def test_the_command_line_goes_before_variables_and_those_before_the_file(tmp_path, monkeypatch):
    got = []
    monkeypatch.setattr("outrider.gateway.app.serve", got.append)
    file = tmp_path / "gateway.toml"
    file.write_text('mode = "record"\nport = 1\nmodel = "file"\n')
    monkeypatch.setenv("OUTRIDER_GATEWAY_MODE", "train")
    monkeypatch.setenv("OUTRIDER_GATEWAY_PORT", "2")
    given = ["gateway", "--upstream", "http://a", "--store", "sqlite:///x", "--config", str(file), "--port", "3"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    assert (got[0].mode, got[0].port, got[0].model) == (Mode.TRAIN, 3, "file")


def test_a_variable_that_is_nearly_an_option_is_told():
    with pytest.raises(ConfigError, match=r"OUTRIDER_GATEWAY_MDOE.*Did you mean OUTRIDER_GATEWAY_MODE"):
        cli_gateway.check_variables(["PATH", "OUTRIDER_GATEWAY_MDOE"])
    # What Kubernetes sets in every pod beside a service called outrider-gateway.
    links = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8080_TCP", "PORT_8080_TCP_ADDR", "PORT")
    cli_gateway.check_variables([f"OUTRIDER_GATEWAY_{name}" for name in links])
    cli_gateway.check_variables(["OUTRIDER_GATEWAY_UPSTREAM_DIALECTS", "OUTRIDER_GATEWAY_CONFIG"])


def test_kubernetes_own_variable_is_no_port():
    given = ["gateway", "--upstream", "http://a", "--store", "sqlite:///x"]
    env = {"OUTRIDER_GATEWAY_PORT": "tcp://10.0.0.1:8080"}
    result = CliRunner().invoke(main, given, env=env)
    assert result.exit_code == 2
    assert "enableServiceLinks: false" in result.output


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weak", ["x", "secret", "a" * 40, "0101010101010101010101", LONG[:19], f"{LONG},admin"])
@pytest.mark.parametrize("role", ["admin_key", "trainer_key", "grader_key", "read_key"])
def test_a_key_that_can_be_guessed_opens_no_public_gateway(role, weak):
    keys = {"admin_key": LONG[::-1], role: weak}
    with pytest.raises(ConfigError, match=f"{role}.*20 random.*openssl rand -hex 24") as found:
        check_options(GatewayOptions(**GIVEN, host="0.0.0.0", **keys))
    assert weak not in str(found.value) or weak == "x"
    check_options(GatewayOptions(**GIVEN, host="127.0.0.1", **keys))


def test_good_keys_open_one():
    check_options(GatewayOptions(**GIVEN, host="0.0.0.0", admin_key=LONG, read_key="sha256:" + "0" * 64))


# -- upstreams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x:99999", "Port out of range"),
        ("http://x:abc", "Port could not be cast"),
        ("http://x:0", "must look like"),
        ("http://[::1", "Invalid IPv6"),
        ("http://a b", "must look like"),
        ("http://x/\u00e4", "must look like"),
        ("127.0.0.1:8000", "must look like"),
        ("http://user:s3cret@x", "not sent"),
        ("http://x/v1?api-version=1", "not sent"),
        ("http://x/#a", "not sent"),
        ("http://x/v1/chat/completions", "leave out '/chat/completions'"),
        ("http://x/v1/messages/", "leave out '/messages/'"),
    ],
)
def test_a_base_url_that_is_none(url, words):
    with pytest.raises(ConfigError, match=words) as found:
        read_base_url(url)
    assert str(found.value).startswith("upstream: ")
    assert "s3cret" not in str(found.value)


@pytest.mark.parametrize("url", ["http://x", "https://x/v1/", "http://[::1]:8000", "http://x:8000/some/models"])
def test_a_base_url_that_is_one(url):
    assert read_base_url(url).hostname in ("x", "::1")
