"""How a gateway is started, and the plug-ins that its options name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.errors import ConfigError
from outrider.protocols import Dialect, Renderer, Store
from outrider.registry import BUILTIN, load_attr, resolve
from outrider.types import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway is started."""

    upstream: str
    """Base URL of the engine or provider, with or without ``/v1``."""
    store: str
    """``sqlite:///PATH``; an absolute path makes four slashes."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free one."""
    mode: Mode = Mode.PASSTHROUGH
    """Rules calls without an attempt key. In ``train`` and ``eval`` they are refused."""
    admin_key: str = field(default="", repr=False)
    """Opens ``/admin``; empty closes it."""
    max_body_mb: float = 64.0
    upstream_timeout_s: float = 600.0
    """Longest time from sending a call to the end of its answer, seconds."""
    pause_wait_s: float = 30.0
    """How long a call waits for a pause to end before it is refused with 503, seconds."""
    store_synchronous: Literal["FULL", "NORMAL"] = "FULL"
    dialects: tuple[str, ...] = tuple(BUILTIN["dialect"])
    """Dialect plug-ins; the first one words errors of routes that belong to none."""
    upstream_dialects: tuple[str, ...] = ("openai_chat", "openai_completions")
    """Those that the upstream speaks itself. Others are translated to chat completions."""
    model: str = ""
    """The policy's name upstream: calls that are trained on or evaluated go there under it; empty keeps the name that
    the agent gave."""
    tokens: Literal["gateway", "engine"] = "gateway"
    """Who renders the prompts of calls that are trained on or evaluated. The gateway does only with a `tokenizer`."""
    tokenizer: str = ""
    """Folder with the policy's tokenizer.json and chat template; empty leaves rendering to the engine."""
    renderer: str = "template"
    """Renderer plug-in, which knows the policy's chat format."""
    parent_pid: int = 0
    """End when this process has gone; 0 for never."""


def open_store(url: str, *, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> Store:
    """The store that a URL names. Raises `ConfigError`, `SetupError`, `StoreError`."""
    # By name, like every plug-in: the gateway imports no store.
    open_by_url = load_attr("outrider.stores.urls:open_store", field="store")
    store: Store = open_by_url(url, synchronous=synchronous)
    return store


def load_renderer(options: GatewayOptions) -> Renderer | None:
    """What makes the prompts; None where the engine does. Raises `ConfigError`."""
    if options.tokens not in ("gateway", "engine"):
        raise ConfigError(f"tokens: must be gateway or engine, not {options.tokens!r}.")
    if options.tokens == "engine" or not options.tokenizer:
        return None
    renderer: Renderer = resolve("renderer", options.renderer, field="renderer")(Path(options.tokenizer))
    return renderer


def load_dialects(names: Sequence[str], upstream: Sequence[str]) -> list[Dialect]:
    """The dialects `names`, to be translated where the upstream does not speak them. Raises `ConfigError`."""
    if not names:
        raise ConfigError("dialects: name at least one.")
    for name in upstream:
        if name not in names:
            raise ConfigError(f"upstream_dialects: {name!r} is none of the gateway's dialects ({', '.join(names)}).")
    found: list[Dialect] = []
    for name in names:
        make = resolve("dialect", name, field="dialects")
        dialect: Dialect = make()
        found.append(make(native=True) if dialect.translated and name in upstream else dialect)
    return found
