"""Commands on a store: export, prune, backup."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Literal

import click

from outrider.cli_common import progress, told_plainly
from outrider.errors import ConfigError
from outrider.protocols import Store


class Duration(click.ParamType[float]):
    """A time with a unit: 90s, 30m, 12h, 30d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        return measure(self, value, {"s": 1, "m": 60, "h": 3600, "d": 86400}, param, ctx)


class Size(click.ParamType[int]):
    """A size with a unit: 500MB, 10GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        units = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
        return int(measure(self, value, units, param, ctx))


def measure(
    kind: click.ParamType[float] | click.ParamType[int],
    value: Any,
    units: dict[str, int],
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> float:
    """Read a number with one of `units` behind it."""
    if isinstance(value, int | float):
        return float(value)
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", value)
    if found is None or found[2] not in units:
        kind.fail(f"{value!r}: write a number and one of {', '.join(units)}, such as 30{list(units)[-2]}.", param, ctx)
    return float(found[1]) * units[found[2]]


def open_existing(url: str) -> Store:
    """To look at a store, or make it smaller, is no reason to make one. Raises `ConfigError`, `StoreError`."""
    from outrider.stores import open_store

    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:///") and not path.exists():
        raise ConfigError(f"store: there is no file {path}.")
    return open_store(url)


@click.command()
@click.argument("store_url")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["parquet", "jsonl"]), help="Default: by the suffix of OUT.")
@click.option("--after", default=0, show_default=True, help="Only calls with a sequence number above this one.")
@told_plainly
def export(store_url: str, out: Path, form: Literal["parquet", "jsonl"] | None, after: int) -> None:
    """Write every call of STORE_URL to OUT, one row a call, with its tokens, fidelity, times and reward."""
    from outrider.stores.export import export_store

    with contextlib.closing(open_existing(store_url)) as store, progress("export") as advance:
        counts = export_store(store, out, format=form, after_seq=after, progress=advance)
    click.echo(f"{counts.calls} calls, {counts.size / 1e6:.1f} MB in {out}; last sequence number {counts.last_seq}")


@click.command()
@click.argument("store_url")
@click.option("--older-than", type=Duration(), help="Attempts older than this, such as 30d or 12h.")
@click.option("--max-size", type=Size(), help="Oldest attempts until the store is no larger, such as 10GB.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and leave it.")
@told_plainly
def prune(store_url: str, older_than: float | None, max_size: int | None, dry_run: bool) -> None:
    """Delete the calls of old attempts, whole attempts only, never of rollouts that still run."""
    from outrider.stores.prune import prune as prune_store

    with contextlib.closing(open_existing(store_url)) as store, progress("prune") as advance:
        counts = prune_store(
            store,
            older_than_s=older_than,
            max_bytes=max_size,
            dry_run=dry_run,
            progress=lambda done, chosen: advance(done),
        )
    verb = "would delete" if dry_run else "deleted"
    click.echo(
        f"{verb} {counts.calls} calls of {counts.attempts} attempts; {counts.given_back / 1e6:.1f} MB given back"
    )
    if not counts.attempts:
        click.echo(
            "What always stays: attempts of running rollouts, and those that did something within the last hour."
        )


@click.command()
@click.argument("store_url")
@click.argument("out", type=click.Path(path_type=Path))
@told_plainly
def backup(store_url: str, out: Path) -> None:
    """Copy a SQLite store to OUT while others write to it, and check the copy."""
    from outrider.stores.backup import backup_store

    with contextlib.closing(open_existing(store_url)) as store, progress("backup") as advance:
        counts = backup_store(store, out, progress=lambda pages, total: advance(pages))
    click.echo(f"{counts.calls} calls, {counts.size / 1e6:.1f} MB in {out}")
