"""What the commands share."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

import click

from outrider.errors import OutriderError

P = ParamSpec("P")
R = TypeVar("R")


def told_plainly(command: Callable[P, R]) -> Callable[P, R]:
    """Turn an `OutriderError` into its message and exit code. A bug keeps its traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except OutriderError as error:
            click.echo("\n".join([f"outrider: {error}", *getattr(error, "__notes__", ())]), err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno != errno.ENOSPC and error.filename is None:
                raise
            click.echo(f"outrider: {error.filename or 'the disk'}: {error.strerror}", err=True)
            sys.exit(3)

    return wrapped


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int], None]]:
    """A counter on a terminal's standard error; silent elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done: bar.update(task, completed=done)
