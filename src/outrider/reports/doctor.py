"""`outrider doctor`: what this machine can run, what is missing, and what to do about it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.reports import machine
from outrider.reports.machine import Check, Status
from outrider.reports.text import clean

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "red"}
_EXIT_CODE = 3  # that of SetupError: the machine lacks something


def diagnose() -> list[Check]:
    """Look at the machine. Takes some seconds where torch is installed, since it is imported in another process."""
    return [
        machine.python_version(),
        machine.cores(),
        machine.memory(),
        machine.disk(),
        machine.sqlite(),
        machine.port(),
        machine.fork(),
        machine.parent_death(),
        *machine.extras(),
        machine.torch(),
        machine.cpu_bf16(),
        machine.model(),
    ]


def capabilities(checks: list[Check]) -> list[tuple[str, Status, str]]:
    """``(what, status, words)`` for each thing that Outrider does."""
    by_name = {check.name: check for check in checks}

    def judge(*names: str, strict: bool) -> list[str]:
        """Names of those checks that stand in the way; `strict` counts warnings too."""
        bad = (Status.FAIL, Status.WARN) if strict else (Status.FAIL,)
        return [name for name in names if name in by_name and by_name[name].status in bad]

    base = judge("Python", "SQLite", "port", strict=False)
    training = judge("extra train", "torch", strict=True)
    quick = base + training + judge("model", "memory", "disk", strict=True) + judge("fork", strict=False)
    found = [
        _verdict("gateway and store", base, "yes"),
        _verdict("engine and training", base + training, "yes, on " + _device(by_name.get("torch"))),
        _verdict("quickstart", quick, _quickstart_words(by_name.get("cpu bf16"))),
    ]
    # Training is an extra and the machine may be meant for the gateway alone: only the base may fail.
    return [found[0]] + [(what, Status.WARN if s is Status.FAIL else s, words) for what, s, words in found[1:]]


def print_doctor(console: Console) -> int:
    """Print the checks and what follows from them. Returns 0, or 3 if not even gateway and store can run."""
    checks = diagnose()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        words = Text(clean(check.found))
        if check.means:
            words.append(f"\n{clean(check.means)}", "dim")
        if check.action:
            words.append(f"\n→ {clean(check.action)}", _STYLES[check.status])
        table.add_row(_mark(check.status), Text(check.name, "bold"), words)
    console.print(table)
    console.print(Text("\nThis machine can run", "bold"))
    verdicts = capabilities(checks)
    for what, status, verdict in verdicts:
        console.print(Text(f"  {what}: ").append(verdict, _STYLES[status]), soft_wrap=True)
    return _EXIT_CODE if any(status is Status.FAIL for _, status, _ in verdicts) else 0


def _mark(status: Status) -> Text:
    return Text(status.value, _STYLES[status])


def _verdict(what: str, missing: list[str], yes: str) -> tuple[str, Status, str]:
    if missing:
        return what, Status.FAIL, f"no, because of {', '.join(dict.fromkeys(missing))} (see above)"
    return what, Status.OK, yes


def _device(torch: Check | None) -> str:
    return "a GPU" if torch is not None and "CUDA" in torch.found.split(",")[0] else "the CPU"


def _quickstart_words(bf16: Check | None) -> str:
    need = f"up to {machine.QUICKSTART_MEMORY_GB:.0f} GB of memory and {machine.QUICKSTART_MINUTES} minutes on 2 cores"
    slow = bf16 is not None and bf16.status is not Status.OK
    return f"yes ({need}{', longer here for want of bf16 instructions' if slow else ''})"
