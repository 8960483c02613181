"""Starts an installed harness in an empty folder, with a clean environment, and waits for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from harnesses.catalog import PROMPT, Dialect, Harness, Installer, Variant
from harnesses.install import Installed

PROGRAMS = Path(__file__).parent / "programs"
API_KEY = "sk-not-a-key"  # every client wants one; the attempt key is in the base URL
KEPT = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    exit_code: int | None
    """None where it ran past its time limit and was killed."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def drive(harness: Harness, variant: Variant, installed: Installed, *, url: str, work: Path) -> Ran:
    """Run one variant against the base URL `url` (without ``/v1``); `work` is its folder and its home."""
    words = {
        "url": url,
        "key": API_KEY,
        "bin": str(installed.bin),
        "python": str(installed.python),
        "programs": str(PROGRAMS),
        "work": str(work),
        "prompt": PROMPT,
    }
    for name, text in variant.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(words))
    command = [Template(part).substitute(words) for part in variant.command]
    env = environment(harness, variant, words)
    started = time.monotonic()
    with (work / "stdout").open("wb") as out, (work / "stderr").open("wb") as err:
        process = subprocess.Popen(
            command, cwd=work, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(harness.timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(process)  # the whole group: what a harness left running would outlive the test
    seconds = time.monotonic() - started
    stdout, stderr = ((work / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Ran(exit_code=exit_code, stdout=stdout, stderr=stderr, seconds=seconds)


def environment(harness: Harness, variant: Variant, words: Mapping[str, str]) -> dict[str, str]:
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    env["HOME"] = words["work"]
    if harness.installer is Installer.PIP:
        env["VIRTUAL_ENV"] = str(Path(words["bin"]).parent)
        env["PATH"] = f"{words['bin']}{os.pathsep}{env['PATH']}"
    if variant.dialect is Dialect.MESSAGES:
        env |= {"ANTHROPIC_BASE_URL": words["url"], "ANTHROPIC_API_KEY": words["key"]}
    else:
        env |= {"OPENAI_BASE_URL": words["url"] + "/v1", "OPENAI_API_KEY": words["key"]}
    for name, text in {**harness.env, **variant.env}.items():
        env[name] = Template(text).substitute(words)
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
