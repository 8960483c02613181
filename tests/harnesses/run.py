"""Runs real harnesses through the gateway and prints what came of each.

    PYTHONPATH=tests python -m harnesses.run --list
    PYTHONPATH=tests python -m harnesses.run --only codex --only openai --json FILE --markdown FILE
    PYTHONPATH=tests python -m harnesses.run --direct URL      without gateway, to try a driver

Each harness is installed once, into ``$OUTRIDER_CACHE/harnesses`` (by default ``~/.cache/outrider/harnesses``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harnesses.bench import Bench, Outcome, Setting
from harnesses.catalog import HARNESSES, Dialect, Harness, Variant
from harnesses.drive import drive
from harnesses.formats import FORMATS
from harnesses.install import Installed, InstallError, install, is_cached
from harnesses.table import to_json, to_markdown
from outrider.types import Mode


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    chosen = [harness for harness in HARNESSES if not options.only or harness.name in options.only]
    unknown = set(options.only) - {harness.name for harness in HARNESSES}
    if unknown:
        print(f"--only: no harness is called {', '.join(sorted(unknown))}; --list shows them.", file=sys.stderr)
        return 2
    if options.list:
        for harness in HARNESSES:
            print(describe(harness))
        return 0
    runs = [(harness, variant) for harness in chosen for variant in wanted(harness, options.dialect)]
    folder = options.keep or Path(tempfile.mkdtemp(prefix="outrider-harnesses-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"working folders: {folder}", file=sys.stderr)
    if options.direct:
        return run_direct(runs, options.direct.rstrip("/"), folder)
    return run_all(runs, options, folder)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Real harnesses through the gateway.")
    parser.add_argument("--list", action="store_true", help="print the catalog and stop")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this harness; may be repeated")
    parser.add_argument("--dialect", type=Dialect, action="append", default=[], help="chat, responses or messages")
    parser.add_argument("--mode", type=Mode, default=Mode.TRAIN, help="train (default), eval, record or passthrough")
    parser.add_argument("--turns", type=int, default=2, help="calls that the task takes (default 2)")
    parser.add_argument(
        "--arguments",
        choices=("plain", "odd", "both"),
        default="plain",
        help="the model writes JSON as json.dumps does (default), as no serialiser does, or a run each",
    )
    parser.add_argument("--rich", action="store_true", help="the model says a sentence and makes two calls at once")
    parser.add_argument("--thinking", action="store_true", help="the model reasons before each answer")
    parser.add_argument(
        "--tokens", choices=("gateway", "engine"), default="gateway", help="who makes the prompts (default gateway)"
    )
    parser.add_argument("--format", choices=FORMATS, default="qwen", help="chat format of the model (default qwen)")
    parser.add_argument(
        "--direct", metavar="URL", help="no gateway: this base URL, without /v1; checks exit status only"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new or empty folder for stores and outputs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    return parser


def describe(harness: Harness) -> str:
    variants = ", ".join(
        variant.dialect.value
        + (" streamed" if variant.streamed else "")
        + (f" ({variant.label})" * bool(variant.label))
        for variant in harness.variants
    )
    cached = "installed" if is_cached(harness) else "not installed"
    lines = [f"{harness.name:15} {' '.join(harness.requirements)} [{cached}]", variants]
    if harness.needs:
        lines.append(f"needs {harness.needs}")
    return f"\n{'':15} ".join(lines)


def wanted(harness: Harness, dialects: Sequence[Dialect]) -> list[Variant]:
    return [variant for variant in harness.variants if not dialects or variant.dialect in dialects]


def run_all(runs: Sequence[tuple[Harness, Variant]], options: argparse.Namespace, folder: Path) -> int:
    outcomes: list[Outcome] = []
    installs: dict[str, Installed] = {}
    for odd in {"plain": (False,), "odd": (True,), "both": (False, True)}[options.arguments]:
        setting = Setting(
            mode=options.mode,
            tokens=options.tokens,
            format=options.format,
            turns=options.turns,
            odd_arguments=odd,
            thinking=options.thinking,
            rich=options.rich,
        )
        place = folder / ("odd" if odd else "plain")
        place.mkdir()
        with Bench(place, setting) as bench:
            for harness, variant in runs:
                print(f"{harness.name}: {variant.dialect.value}{' streamed' * variant.streamed} …", file=sys.stderr)
                try:
                    installs[harness.name] = install(harness)
                    outcomes.append(bench.run(harness, variant, installs[harness.name]))
                except InstallError as error:
                    outcomes.append(not_installed(harness, variant, error, odd=odd))
    table = to_markdown(outcomes, installs)
    print(table, end="")
    if options.markdown:
        options.markdown.write_text(table)
    if options.json:
        options.json.write_text(to_json(outcomes, installs))
    return 0 if outcomes and all(outcome.ok for outcome in outcomes) else 1


def not_installed(harness: Harness, variant: Variant, error: InstallError, *, odd: bool) -> Outcome:
    return Outcome(
        harness=harness.name,
        version=harness.version,
        dialect=variant.dialect,
        label=variant.label,
        streamed=variant.streamed,
        odd_arguments=odd,
        calls=0,
        fidelity={},
        prompts={},
        notes={},
        samples=0,
        samples_anew=None,
        problems=(f"not installed: {' '.join(str(error).split())[-300:]}",),
        seconds=0.0,
        output="",
    )


def run_direct(runs: Sequence[tuple[Harness, Variant]], url: str, folder: Path) -> int:
    failed = 0
    for number, (harness, variant) in enumerate(runs):
        work = folder / f"{number}-{harness.name}"
        work.mkdir()
        ran = drive(harness, variant, install(harness), url=url, work=work)
        failed += ran.exit_code != 0
        last = " ".join(ran.output.split())[-160:]
        what = f"{harness.name} {variant.dialect.value}{' streamed' * variant.streamed} {variant.label}"
        print(f"{what:40} exit {ran.exit_code}, {ran.seconds:.1f} s: {last}")
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
