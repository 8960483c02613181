"""Tasks from JSONL files."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ConfigError
from outrider.types import Task


def load_tasks(path: Path, *, field: str) -> list[Task]:
    """One task a line: a JSON object with a unique ``id``, which may be a string or an integer.

    `field` is the configuration key that named the file. Raises `ConfigError` with file and line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{field}: there is no file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field}: {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    tasks: dict[str, Task] = {}
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{field}: {path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not valid JSON: {error.msg} at column {error.colno}.") from None
        except RecursionError:
            raise ConfigError(f"{where}: not valid JSON: nested too deeply.") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: each line must be a JSON object, this is a {type(row).__name__}.")
        name = row.get("id")
        if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
            raise ConfigError(f"{where}: needs an `id`, a string or an integer; it has {name!r}.")
        task = Task(id=str(name), fields=row)
        if task.id in tasks:
            raise ConfigError(f"{where}: id {task.id!r} was used before, in line {seen[task.id]}.")
        tasks[task.id], seen[task.id] = task, number
    if not tasks:
        raise ConfigError(f"{field}: {path} holds no task.")
    return list(tasks.values())
