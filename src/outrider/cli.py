"""The command line. Each command turns its options into one typed object and hands it to the part that works."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click

from outrider import __version__, cli_gateway, cli_store
from outrider import config as configuration
from outrider.cli_common import told_plainly
from outrider.errors import ConfigError, OutriderError
from outrider.sections import fields, section_in


@click.group(context_settings={"auto_envvar_prefix": "OUTRIDER", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="outrider")
def main() -> None:
    """Train the model behind an agent through the harness the agent ships in.

    \b
    Try it:                   outrider quickstart
    Your own agent:           outrider train RUN.toml     (docs/your-agent.md; outrider config lists every key)
    Look at a run:            outrider inspect RUN-FOLDER
    Record production calls:  outrider gateway --upstream URL --store sqlite:///calls.sqlite3 --mode record
    Check a machine:          outrider doctor

    Every option can also be set by a variable: OUTRIDER_GATEWAY_PORT is --port of `outrider gateway`.
    """


main.add_command(cli_gateway.gateway)
main.add_command(cli_store.export)
main.add_command(cli_store.prune)
main.add_command(cli_store.backup)


# -- services ----------------------------------------------------------------------------------------------------------


@main.command()
@click.option("--model", required=True, help="Hugging Face folder, .gguf file, or package:NAME.")
@click.option("--name", default="policy", show_default=True, help="Name under which it is served.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port; 0 for any free one.")
@click.option("--slots", default=32, show_default=True, help="Requests decoded at the same time.")
@click.option("--max-model-len", default=2048, show_default=True, help="Longest prompt plus answer, tokens.")
@click.option("--prefix-cache-tokens", default=16384, show_default=True, help="Prefix cache, tokens; 0 for none.")
@click.option("--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True)
@click.option("--threads", default=0, show_default=True, help="CPU threads; 0 for all cores.")
@click.option("--seed", default=0, show_default=True, help="Seed of the sampler.")
@click.option("--version", "policy_version", default=0, show_default=True, help="Policy version of --model.")
@click.option("--parent-pid", default=0, help="Stop when this process is gone.", hidden=True)
@told_plainly
def engine(
    model: str,
    name: str,
    host: str,
    port: int,
    slots: int,
    max_model_len: int,
    prefix_cache_tokens: int,
    dtype: Literal["auto", "bfloat16", "float32"],
    threads: int,
    seed: int,
    policy_version: int,
    parent_pid: int,
) -> None:
    """Serve a model over the OpenAI API, with token ids and log-probs (needs the `train` extra)."""
    from outrider.engines.embedded.server import EngineOptions, serve

    serve(
        EngineOptions(
            model=model,
            name=name,
            host=host,
            port=port,
            slots=slots,
            max_model_len=max_model_len,
            prefix_cache_tokens=prefix_cache_tokens,
            dtype=dtype,
            threads=threads,
            seed=seed,
            version=policy_version,
            parent_pid=parent_pid,
        )
    )


# -- runs --------------------------------------------------------------------------------------------------------------

override = click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key, as train.lr=1e-5.")


@main.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@override
@told_plainly
def train(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Train as RUN_FILE says. The same command resumes a run that was stopped or killed."""
    train_to_end(configuration.load(run_file, overrides), run_file.resolve().parent)


@main.command("eval")
@click.argument("run_file", type=click.Path(path_type=Path))
@override
@told_plainly
def evaluate(run_file: Path, overrides: tuple[str, ...]) -> None:
    """Measure a model on the held-out tasks: -o model.path=RUN/best -o out=DIR. Prints one JSON object."""
    config = configuration.load(run_file, overrides)
    from outrider import assemble
    from outrider.reports.offered import unseen_in_run

    with started(config, run_file.resolve().parent, training=False) as (inputs, view, stop):
        record = assemble.evaluate(inputs, view, stop)
    with assemble.opened(inputs.folder) as store:
        unseen = unseen_in_run(store, assemble.tokenizer(inputs.folder))
    if unseen:
        click.echo(unseen, err=True)
    click.echo(json.dumps(record))


@main.command()
@click.option("--seed", default=0, show_default=True, help="Seed of data order and sampling.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Run folder  [default: runs/quickstart-SEED]"
)
@override
@told_plainly
def quickstart(seed: int, out: Path | None, overrides: tuple[str, ...]) -> None:
    """Teach a 135M model to use a calculator, through an agent that knows nothing of Outrider (about 10 minutes)."""
    from outrider.recipes.quickstart import run_file

    file = run_file()
    out = (out or Path("runs") / f"quickstart-{seed}").resolve()
    config = configuration.load(file, (f"seed={seed}", f'out="{out}"', *overrides))
    train_to_end(config, file.parent)


@contextlib.contextmanager
def started(
    config: configuration.RunConfig, root: Path, *, training: bool
) -> Iterator[tuple[Any, Any, threading.Event]]:
    """Lock the run folder, check what the configuration names and show a live view, until the run ends."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve the other processes
    from rich.console import Console

    from outrider import assemble
    from outrider.reports.live import LiveView
    from outrider.runfolder import RunFolder

    with RunFolder(Path(config.out).resolve()) as folder, assemble.stop_on_signals() as stop:
        inputs = assemble.check_inputs(config, root, folder, training=training)
        folder.adopt(config)
        try:
            with LiveView(
                steps=config.train.steps if training else 0,
                success=config.reward.success,
                title=f"{config.model.path} · seed {config.seed}",
                console=Console(stderr=not training),  # what an evaluation prints is for programs
            ) as view:
                yield inputs, view, stop
        except OutriderError as error:
            if not isinstance(error, ConfigError):  # that comes first, or the same command says the same again
                error.add_note(f"The run lies in {folder.root}; the same command goes on from there.")
            raise


def train_to_end(config: configuration.RunConfig, root: Path) -> None:
    """Train, summarise and report. A run that is finished already is only reported."""
    from outrider import assemble
    from outrider.reports.closing import closing_words
    from outrider.reports.history import read_history
    from outrider.reports.offered import unseen_in_run
    from outrider.reports.report import write_report
    from outrider.reports.summary import write_summary

    with started(config, root, training=True) as (inputs, view, stop):
        result = assemble.train(inputs, view, stop)
    folder = inputs.folder
    write_summary(
        folder.root,
        before=result["before"],
        after=result["after"],
        wall_s=result["wall_s"],
        peak_rss_bytes=result["peak_rss_bytes"],
        seed=config.seed,
        model=config.model.path,
        steps=config.train.steps,
        best=result["best"],
    )
    with assemble.opened(folder) as store:
        tokenizer = assemble.tokenizer(folder)
        write_report(folder.root, store, tokenizer=tokenizer)
        unseen = unseen_in_run(store, tokenizer)
    click.echo(closing_words(read_history(folder.root), unseen))


# -- looking -----------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("run_folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("rollout", required=False)
@click.option("--split", help="Only this split: train, before/greedy, after/sampled, …")
@click.option("--step", type=int, help="Only this training step.")
@click.option("--state", type=click.Choice(["queued", "running", "succeeded", "failed", "cancelled"]))
@click.option("--limit", default=50, show_default=True, help="Rows shown.")
@click.option("--tokens", is_flag=True, help="With ROLLOUT: every token with its log-prob.")
@told_plainly
def inspect(
    run_folder: Path,
    rollout: str | None,
    split: str | None,
    step: int | None,
    state: str | None,
    limit: int,
    tokens: bool,
) -> None:
    """List the rollouts of a run, or show one: turns, tokens, log-probs, reward and its reasons."""
    from rich.console import Console

    from outrider import assemble
    from outrider.reports import inspect as view
    from outrider.runfolder import RunFolder
    from outrider.types import RolloutState

    folder, console = RunFolder(run_folder), Console()
    with assemble.opened(folder) as store:
        if rollout is None:
            wanted = RolloutState(state) if state else None
            view.list_rollouts(store, console, split=split, step=step, state=wanted, limit=limit)
        else:
            view.show_rollout(store, rollout, console, tokenizer=assemble.tokenizer(folder), all_tokens=tokens)


@main.command()
@click.argument("run_folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@told_plainly
def report(run_folder: Path) -> None:
    """Write report.html and report.png of a run anew, finished or not."""
    from outrider import assemble
    from outrider.reports.report import write_report
    from outrider.runfolder import RunFolder

    folder = RunFolder(run_folder)
    with assemble.opened(folder) as store:
        click.echo(f"Report: {write_report(folder.root, store, tokenizer=assemble.tokenizer(folder))}")


@main.command()
@click.argument("run_folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--split", default="train", show_default=True, help="Rollouts of this split.")
@click.option("--step", type=int, help="Only this training step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@told_plainly
def drift(run_folder: Path, split: str, step: int | None, as_json: bool) -> None:
    """Say what broke the continuity of tokens between the calls of a run, and how many tokens that cost."""
    from rich.console import Console

    from outrider import assemble
    from outrider.reports.drift import print_drift
    from outrider.runfolder import RunFolder
    from outrider.trajectory.drift import Drift

    found = Drift()
    with assemble.opened(RunFolder(run_folder)) as store:
        for rollout in store.rollouts(split=split, step=step):
            if rollout.attempt:
                found.add(store.calls(rollout.attempt_id))
    if as_json:
        click.echo(json.dumps(found.report()))
    else:
        print_drift(found.report(), Console())


@main.command()
@told_plainly
def doctor() -> None:
    """Say what this machine can run, and what is missing."""
    from rich.console import Console

    from outrider.reports.doctor import print_doctor

    sys.exit(print_doctor(Console()))


@main.command("config")
def show_config() -> None:
    """Print every key of a run file with its default and meaning."""
    for line in describe(configuration.RunConfig, ""):
        click.echo(line)


def describe(section: type[Any], where: str) -> list[str]:
    """Lines of `outrider config`, sections after the plain keys of their parent."""
    import msgspec

    own, nested = [], []
    for name, kind, meta, default in fields(section):
        inner = section_in(kind)
        if inner is not None:
            head = f"[{where}{name}]" if inner is kind else f"[[{where}{name}]]"
            nested += ["", f"{head}  {meta.description}", *describe(inner, f"{where}{name}.")]
        else:
            shown = "required" if default is msgspec.NODEFAULT else json.dumps(default)  # as TOML writes it
            own.append(f"  {where}{name} = {shown}\n      {meta.description}")
    return own + nested
