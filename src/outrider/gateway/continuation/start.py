"""Continuation as a gateway's options ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.errors import ConfigError
from outrider.gateway.continuation.turns import Continuation
from outrider.gateway.options import GatewayOptions
from outrider.gateway.telemetry.counters import Counters
from outrider.protocols import Store
from outrider.registry import resolve
from outrider.wire import Dialect, Renderer


def make_continuation(
    options: GatewayOptions, store: Store, dialects: Sequence[Dialect], counters: Counters
) -> Continuation | None:
    """None where the engine renders the prompts. Raises `ConfigError`."""
    if options.tokens not in ("gateway", "engine"):
        raise ConfigError(f"tokens: must be gateway or engine, not {options.tokens!r}.")
    if options.tokens == "engine" or not options.tokenizer:
        return None
    renderer: Renderer = resolve("renderer", options.renderer, field="renderer")(Path(options.tokenizer))
    completions: Dialect = resolve("dialect", "openai_completions", field="tokens")()
    frees_calls = options.forced_tools == "free"
    return Continuation(renderer, store, dialects, completions, counters, frees_calls=frees_calls)
