"""Plug-ins by name: a short name that ships with Outrider, an installed entry point, or ``module:attr``."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

# kind -> short name -> module:attr. Nothing here is imported before it is asked for.
BUILTIN: dict[str, dict[str, str]] = {
    "store": {
        "sqlite": "outrider.stores.sqlite:SqliteStore",
        "postgres": "outrider.stores.postgres:PostgresStore",
        "postgresql": "outrider.stores.postgres:PostgresStore",  # the scheme of its URLs
    },
    "engine": {"embedded": "outrider.engines.embedded.client:EmbeddedEngine"},
    "executor": {"local": "outrider.executors.local:LocalExecutor"},
    "backend": {"torch": "outrider.backends.torch:TorchBackend"},
    "dialect": {
        "openai_chat": "outrider.dialects.openai_chat:OpenAIChat",
        "openai_completions": "outrider.dialects.openai_completions:OpenAICompletions",
        "openai_responses": "outrider.dialects.openai_responses:OpenAIResponses",
        "anthropic_messages": "outrider.dialects.anthropic_messages:AnthropicMessages",
    },
    "renderer": {
        "auto": "outrider.renderers.library:AutoRenderer",
        "template": "outrider.renderers.template:TemplateRenderer",
        "library": "outrider.renderers.library:LibraryRenderer",
    },
    "sampler": {
        "shuffle": "outrider.samplers.shuffle:Shuffle",
        "difficulty": "outrider.samplers.difficulty:Difficulty",
    },
    "reward": {"exact_match": "outrider.rewards.exact_match:exact_match"},
}


def resolve(kind: str, name: str, *, field: str, root: Path | None = None) -> Any:
    """Return the object called `name` of a `kind` such as ``reward``.

    `field` is the configuration key that named it, for messages. `root` is put on ``sys.path`` for ``module:attr``
    names, so that a run file can name modules that lie beside it. Raises `ConfigError`.
    """
    target = BUILTIN.get(kind, {}).get(name)
    if target is None and ":" not in name:
        for point in importlib.metadata.entry_points(group=f"outrider.{kind}"):
            if point.name == name:
                return point.load()
        known = sorted(BUILTIN.get(kind, {}))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{field}: no {kind} called {name!r}.{hint} Known: {', '.join(known)}; or give module:attr.")
    return load_attr(target or name, field=field, root=root)


def load_attr(target: str, *, field: str, root: Path | None = None) -> Any:
    """Import ``module:attr``. Raises `ConfigError` that tells a missing module from a missing attribute."""
    module_name, _, attr = target.partition(":")
    if not module_name or not attr:
        raise ConfigError(f"{field}: {target!r} must look like package.module:attribute.")
    if root is not None and str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{field}: there is no module {module_name!r} (looked in {root or 'sys.path'})."
            ) from error
        extra = "render" if module_name.startswith("outrider.renderers.") else "train"
        raise ConfigError(
            f"{field}: {module_name!r} needs the package {error.name!r}, which is not installed."
            + (f" Install the extra: pip install 'outrider[{extra}]'." if module_name.startswith("outrider.") else "")
        ) from error
    try:
        found: Any = module
        for part in attr.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        near = difflib.get_close_matches(attr, dir(module), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{field}: module {module_name!r} has no {attr!r}.{hint}") from error
    return found
