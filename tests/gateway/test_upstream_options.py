"""How replicas and their limits are named on the command line, in variables and in a file."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from outrider import cli
from outrider.errors import ConfigError
from outrider.gateway import app
from outrider.gateway.options import GatewayOptions, check_options, load_options

STORE = ("--store", "sqlite:///x")
TWO = ("http://a:1", "http://b:2/v1")


@pytest.fixture
def run(monkeypatch):
    """Runs the command and gives the options that the gateway would be started with."""
    served = []
    monkeypatch.setattr(app, "serve", served.append)

    def run(*arguments, env=None):
        result = CliRunner().invoke(cli.main, ["gateway", *arguments], env=env or {})
        assert result.exit_code == 0, result.output
        return served.pop()

    return run


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--upstream", TWO[0], "--upstream", TWO[1]), {}),
        (("--upstream", ", ".join(TWO)), {}),
        ((), {"OUTRIDER_GATEWAY_UPSTREAM": ",".join(TWO)}),
        ((), {"OUTRIDER_GATEWAY_UPSTREAM": " ".join(TWO)}),
    ],
)
def test_replicas_are_repeated_or_have_commas_between_them(run, arguments, env):
    assert run(*arguments, *STORE, env=env).upstreams == TWO


@pytest.mark.parametrize("text", ['["http://a:1", "http://b:2/v1"]', '"http://a:1,http://b:2/v1"'])
def test_a_file_names_them_as_a_list_or_as_a_text(tmp_path, text):
    path = tmp_path / "g.toml"
    path.write_text(f'upstream = {text}\nstore = "sqlite:///x"\n')
    assert load_options(path, {}).upstreams == TWO


def test_limits_have_options_of_their_own(run):
    options = run(
        *("--upstream", "http://a", *STORE),
        *("--upstream-connect-timeout-s", "1", "--upstream-first-byte-timeout-s", "2"),
        *("--upstream-chunk-timeout-s", "3", "--upstream-timeout-s", "4", "--upstream-retries", "5"),
        *("--upstream-retry-s", "6", "--health-path", "/v1/models", "--health-interval-s", "7"),
        *("--health-fall", "8", "--health-rise", "9"),
    )
    assert options.upstreams == ("http://a",)
    assert (options.upstream_connect_timeout_s, options.upstream_first_byte_timeout_s) == (1, 2)
    assert (options.upstream_chunk_timeout_s, options.upstream_timeout_s, options.upstream_retries) == (3, 4, 5)
    assert (options.upstream_retry_s, options.health_path, options.health_interval_s) == (6, "/v1/models", 7)
    assert (options.health_fall, options.health_rise) == (8, 9)


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(ConfigError, match="health_path: 'health' must begin with a slash"):
        check_options(GatewayOptions(upstream="http://a", store="x", health_path="health"))
    for text in ("upstream = 5", "upstream = []", 'upstream = "http://x"\nupstream_retries = -1'):
        path = tmp_path / "g.toml"
        path.write_text(f'{text}\nstore = "sqlite:///x"\n')
        with pytest.raises(ConfigError, match="upstream"):
            load_options(path, {})
