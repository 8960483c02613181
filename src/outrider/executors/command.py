"""What a harness's command line means: which interpreter, which file, and what a task puts into it."""

from __future__ import annotations

import os
import re
import shutil
import string
import sys
from collections.abc import Mapping
from pathlib import Path

from outrider.config import HarnessConfig
from outrider.errors import ConfigError
from outrider.types import Json, Task

PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
PACKED = {".pyc", ".pyz", ".zip"}


class Command:
    """A harness as configured. `root` is the folder of the run file.

    Files named in the command are looked for beside the run file first: a word of it that names a file there stands
    for that file, wherever the harness then runs. `interpreter` is the Python that runs the fork server: the one the
    command names by a path; ``python`` and ``python3`` mean the one that runs Outrider.

    `kind` is how the fork server starts it: ``script``, ``module``, ``code`` and ``function`` run inside a forked
    interpreter, a ``program`` is executed.
    """

    def __init__(self, harness: HarnessConfig, root: Path) -> None:
        self._harness = harness
        self._root = root
        self.interpreter = sys.executable
        self.kind = "function"
        self._words: tuple[str, ...] = ()
        if not harness.command:
            return
        program, *words = harness.command
        program = self._program(program)
        words = [self._beside(word) for word in words]
        self.kind = "program"
        self._words = (program, *words)
        if not PYTHON.fullmatch(os.path.basename(program)):
            return
        self.interpreter = program
        if words[:1] == ["-m"] and len(words) > 1:
            self.kind, self._words = "module", tuple(words[1:])
        elif words[:1] == ["-c"] and len(words) > 1:
            self.kind, self._words = "code", tuple(words[1:])
        elif words and not words[0].startswith("-") and self._is_source(words[0]):
            self.kind, self._words = "script", tuple(words)

    @property
    def name(self) -> str:
        """The configuration key that holds it, for messages."""
        return "harness.function" if self.kind == "function" else "harness.command"

    @property
    def depends_on_task(self) -> bool:
        """What is started is itself a field of the task, so that nothing can be said before."""
        return self.kind not in ("function", "code") and "{" in self._words[0]

    @property
    def first_path(self) -> Path:
        """``sys.path[0]`` of the harness, where its own modules lie."""
        return Path(self._words[0]).parent if self.kind == "script" else self._root

    def env(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Ours, then what the run file adds, then `extra`, which leads the harness to the gateway and so wins."""
        return {**os.environ, **self._harness.env, **extra}

    def check(self, task: Task) -> None:
        """Raise `ConfigError` when a placeholder names a field that `task` lacks."""
        for key, texts in (("harness.command", self._harness.command), ("harness.stdin", (self._harness.stdin,))):
            for text in texts:
                fill(text, task, key)

    def job(self, task: Task | None, *, workdir: Path, env: Mapping[str, str]) -> Json:
        """What `forkserver.run_job` wants; without a task, placeholders stay as they are."""
        argv = [fill(word, task, "harness.command") if task else word for word in self._words]
        return {
            "kind": self.kind,
            "argv": argv,
            "function": self._harness.function,
            "fields": task.fields if task and self.kind == "function" else None,
            "root": str(self._root),
            "cwd": str(self._root / self._harness.cwd if self._harness.cwd else workdir),
            "env": self.env(env),
            "memory_mb": self._harness.memory_mb,
            "preload": list(self._harness.preload),
        }

    def stdin(self, task: Task) -> str:
        return fill(self._harness.stdin, task, "harness.stdin")

    def _program(self, word: str) -> str:
        if word in ("python", "python3"):
            return sys.executable
        beside = self._root / word
        if beside.is_file() and ("/" in word or shutil.which(word) is None):
            return str(beside)
        return str(beside) if "/" in word else word

    def _beside(self, word: str) -> str:
        """The file of that name beside the run file, unless the harness finds it in its own working directory."""
        cwd = self._harness.cwd
        if not word or "{" in word or (cwd and (self._root / cwd / word).exists()):
            return word
        try:
            return str(self._root / word) if (self._root / word).is_file() else word
        except OSError:  # too long for a name
            return word

    def _is_source(self, script: str) -> bool:
        """A script that is not there counts, so that its absence is told; a folder or an archive is left to Python."""
        path = self._root / self._harness.cwd / script
        return path.suffix not in PACKED and not path.is_dir()


def fill(text: str, task: Task, key: str) -> str:
    """Put the task's fields into ``{field}`` places; ``{{`` and ``}}`` are braces.

    Raises `ConfigError` that names the configuration key, the field and the task.
    """
    out = []
    try:
        for literal, name, spec, conversion in string.Formatter().parse(text):
            out.append(literal)
            if name is None:
                continue
            if spec or conversion or name not in task.fields:
                have = ", ".join(sorted(task.fields))
                raise ConfigError(f"{key}: {{{name}}} is no field of task {task.id!r}, which has: {have}.")
            out.append(str(task.fields[name]))
    except ValueError as error:
        raise ConfigError(f"{key}: {text!r}: {error}. Write {{{{ and }}}} for plain braces.") from None
    filled = "".join(out)
    if "\0" in filled:
        raise ConfigError(f"{key}: a field of task {task.id!r} holds a NUL character, which no argument can carry.")
    return filled
