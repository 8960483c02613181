"""The gateway's command. Its options are the fields of `GatewayOptions`: one place says what they are."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import msgspec
from click.core import ParameterSource

from outrider.cli_common import told_plainly
from outrider.errors import ConfigError
from outrider.gateway.options import GatewayOptions, load_options
from outrider.sections import fields

HIDDEN = ("parent_pid",)
VARIABLES = "OUTRIDER_GATEWAY_"


def gateway_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each field: ``sample_rate`` is ``--sample-rate``; one with several values is named in the singular
    and repeated. Keys are also read from OUTRIDER_ADMIN_KEY and the like."""
    for name, kind, meta, default in reversed(fields(GatewayOptions)):
        several = tuple in (get_origin(kind), *map(get_origin, get_args(kind)))
        flag = "--" + (name.removesuffix("s") if several else name).replace("_", "-")
        settings: dict[str, Any] = {"help": meta.description, "hidden": name in HIDDEN}
        if default is not msgspec.NODEFAULT:
            default = default.value if isinstance(default, StrEnum) else default
            settings |= {"default": default, "show_default": default not in ("", ())}
        if name.endswith("_key"):
            settings |= {"envvar": [f"OUTRIDER_{name.upper()}", f"OUTRIDER_GATEWAY_{name.upper()}"]}
        command = click.option(
            flag,
            name,
            type=_Port() if name == "port" else _type(kind),
            multiple=several,
            is_flag=kind is bool,
            **settings,
        )(command)
    return command


class _Port(click.types.IntParamType):
    """Kubernetes sets a variable of the same name in each pod beside a service that is called outrider-gateway."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.startswith("tcp://"):
            self.fail(
                f"{value!r} is what Kubernetes puts into OUTRIDER_GATEWAY_PORT for a service of this name. Give "
                "--port, or set enableServiceLinks: false in the pod.",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def check_variables(environ: Iterable[str]) -> None:
    """Raises `ConfigError` for a variable whose name is nearly an option's."""
    known = [f"{VARIABLES}{name.upper()}" for name in ("config", *(name for name, *_ in fields(GatewayOptions)))]
    for name in environ:
        if name.startswith(VARIABLES) and name not in known:
            near = difflib.get_close_matches(
                name.removeprefix(VARIABLES), [one[len(VARIABLES) :] for one in known], 1, 0.7
            )
            if near:
                raise ConfigError(f"{name}: there is no such variable. Did you mean {VARIABLES}{near[0]}?")


def _type(kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return click.Choice([member.value for member in kind])
    return str if get_args(kind) else kind  # one of several, or of several forms


@click.command()
@click.option(
    "--config",
    "config_file",
    envvar="OUTRIDER_GATEWAY_CONFIG",
    type=click.Path(path_type=Path),
    help="TOML file with options, named as here with _ for -, or in the plural where one may be repeated. "
    "The command line and variables go before it.",
)
@gateway_options
@click.pass_context
@told_plainly
def gateway(context: click.Context, /, config_file: Path | None, **given: Any) -> None:
    """Run the gateway between agents and their model. Ready when GET /health answers 200."""
    from outrider.gateway.app import serve

    check_variables(os.environ)
    named = {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    serve(load_options(config_file, named))
