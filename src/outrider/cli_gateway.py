"""The gateway's command. Its options are the fields of `GatewayOptions`: one place says what they are."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import msgspec
from click.core import ParameterSource

from outrider.cli_common import told_plainly
from outrider.gateway.options import GatewayOptions, load_options
from outrider.sections import fields

HIDDEN = ("parent_pid",)


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
        command = click.option(flag, name, type=_type(kind), multiple=several, is_flag=kind is bool, **settings)(
            command
        )
    return command


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

    named = {
        name: value
        for name, value in given.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    serve(load_options(config_file, named))
