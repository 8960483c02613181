"""How a gateway is started: one typed section, from the command line, variables or a TOML file, and what it names."""

from __future__ import annotations

import difflib
import ipaddress
import re
import tomllib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from outrider.errors import ConfigError
from outrider.gateway.roles import KEY_FORM, Roles
from outrider.protocols import Store
from outrider.registry import BUILTIN, load_attr, resolve
from outrider.sections import Section, fields
from outrider.types import Json, Mode
from outrider.wire import Dialect

_KEY = f"{KEY_FORM}; empty for nobody."


class GatewayOptions(Section, frozen=True, kw_only=True):
    """Every field can stand in the file of `load_options` under its own name."""

    upstream: Annotated[
        str | tuple[str, ...],
        Meta(
            description="Base URL of the engine or provider, with or without /v1; several, repeated or with commas "
            "between them, are replicas."
        ),
    ]
    store: Annotated[str, Meta(description="Where calls are kept: sqlite:///PATH or postgresql://….")]
    host: Annotated[str, Meta(description="Address to listen on; other than loopback it needs --admin-key.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="Port; 0 for any free one.")] = 8080
    mode: Annotated[
        Mode,
        Meta(description="What is kept of calls that come without an attempt key; a key brings its own mode."),
    ] = Mode.PASSTHROUGH
    unkeyed: Annotated[
        Literal["auto", "allow", "refuse"],
        Meta(
            description="Calls without an attempt key in passthrough and record; auto refuses them where other "
            "machines reach the gateway and the upstream is plain http, so most likely an engine that asks for no key."
        ),
    ] = "auto"
    sample_rate: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of trajectories that mode record keeps, each of them whole."),
    ] = 1.0
    model: Annotated[
        str,
        Meta(description="The policy's name upstream, for calls of attempts; empty keeps the agents' own."),
    ] = ""
    tokens: Annotated[
        Literal["gateway", "engine"],
        Meta(description="Who makes prompts of attempts' messages; the gateway does if it has a tokenizer."),
    ] = "gateway"
    forced_tools: Annotated[
        Literal["free", "engine"],
        Meta(
            description="Tool calls that attempts' requests force, with tokens gateway: free samples them as any "
            "answer, engine leaves them to the engine's grammar, whose distribution is not the trainer's."
        ),
    ] = "free"
    tokenizer: Annotated[
        str,
        Meta(description="Folder with the policy's tokenizer.json and chat template; empty leaves it to the engine."),
    ] = ""
    renderer: Annotated[str, Meta(description="What knows the policy's chat format: auto, library or template.")] = (
        "auto"
    )
    dialects: Annotated[
        tuple[str, ...],
        Meta(description="Dialects spoken to agents; the first words errors of routes that belong to none."),
    ] = tuple(BUILTIN["dialect"])
    upstream_dialects: Annotated[
        tuple[str, ...],
        Meta(description="All dialects the upstream speaks itself; others are translated to chat completions."),
    ] = ("openai_chat", "openai_completions")
    admin_key: Annotated[str, Meta(description=f"Opens all of /admin; best given as OUTRIDER_ADMIN_KEY. {_KEY}")] = ""
    trainer_key: Annotated[str, Meta(description=f"Opens attempts, pause, resume, rewards and reading. {_KEY}")] = ""
    grader_key: Annotated[str, Meta(description=f"Opens rewards and reading. {_KEY}")] = ""
    read_key: Annotated[str, Meta(description=f"Opens reading. {_KEY}")] = ""
    reward_min: Annotated[float, Meta(description="Rewards and feedback below it are refused.")] = -1e6
    reward_max: Annotated[float, Meta(description="Rewards and feedback above it are refused.")] = 1e6
    agent_final: Annotated[
        bool, Meta(description="Feedback over an attempt key may be named final, which is the reward that counts.")
    ] = False
    redact: Annotated[
        Literal["off", "record", "all"],
        Meta(description="Modes in which secrets and e-mail addresses are taken out of what is stored."),
    ] = "record"
    redact_patterns: Annotated[tuple[str, ...], Meta(description="More regular expressions of what is taken out.")] = ()
    max_body_mb: Annotated[
        float, Meta(gt=0, le=1 << 20, description="Largest request body, MiB, also once unpacked.")
    ] = 64.0
    max_answer_mb: Annotated[
        float,
        Meta(gt=0, le=1 << 20, description="Largest answer that is recorded or translated, MiB, also once unpacked."),
    ] = 256.0
    pack_answers: Annotated[
        bool,
        Meta(description="Recorded answers are sent with zstd or gzip to agents that take it; costs CPU."),
    ] = False
    max_in_flight: Annotated[
        int, Meta(ge=1, description="Calls under way at the same time; one more is turned away with 503.")
    ] = 4096
    rate_per_key: Annotated[
        float, Meta(ge=0, description="Calls per second and key; more are turned away with 429. 0 for no limit.")
    ] = 0.0
    header_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest wait for a request's headers to be complete, seconds.")
    ] = 30.0
    idle_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest silence of an agent that sends a body or takes in an answer, seconds."),
    ] = 60.0
    upstream_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest wait from sending a call to the end of its answer, retries too, seconds."),
    ] = 600.0
    upstream_connect_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest wait for a connection to a replica, seconds.")
    ] = 10.0
    upstream_first_byte_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Longest wait for an answer to begin; a plain one begins when it is whole, seconds."),
    ] = 600.0
    upstream_chunk_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest silence inside an answer that has begun, seconds.")
    ] = 300.0
    upstream_retries: Annotated[
        int,
        Meta(ge=0, le=100, description="How often a call is sent again while the agent has got nothing of an answer."),
    ] = 2
    upstream_retry_s: Annotated[
        float, Meta(ge=0, description="Longest time that a call waits between its sendings, all together, seconds.")
    ] = 30.0
    health_path: Annotated[
        str, Meta(description="Path upstream, after the base URL without /v1, that shows whether a replica is up.")
    ] = "/health"
    health_interval_s: Annotated[float, Meta(gt=0, description="Time between two looks at a replica, seconds.")] = 2.0
    health_fall: Annotated[
        int, Meta(ge=1, description="A replica is down after this many failures in a row, of looks or to connect.")
    ] = 2
    health_rise: Annotated[int, Meta(ge=1, description="It is up again after this many good looks in a row.")] = 1
    pause_wait_s: Annotated[
        float, Meta(ge=0, description="How long a call waits for a pause to end before it gets a 503, seconds.")
    ] = 30.0
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, description="After SIGTERM, the longest wait for calls under way before they are cut, seconds."),
    ] = 600.0
    log_level: Annotated[
        Literal["info", "warning", "off"],
        Meta(description="Lines on standard error: for each call, for those that did not end well, or for none."),
    ] = "warning"
    log_format: Annotated[Literal["json", "text"], Meta(description="Form of those lines.")] = "json"
    store_synchronous: Annotated[
        Literal["FULL", "NORMAL"],
        Meta(description="SQLite: FULL survives a power cut, NORMAL only a crash of the process."),
    ] = "FULL"
    parent_pid: Annotated[int, Meta(ge=0, description="End when this process has gone; 0 for never.")] = 0

    @property
    def upstreams(self) -> tuple[str, ...]:
        """The base URL of each replica."""
        given = (self.upstream,) if isinstance(self.upstream, str) else self.upstream
        return tuple(url.strip() for several in given for url in several.split(",") if url.strip())

    @property
    def takes_unkeyed(self) -> bool:
        """Calls without an attempt key are let in, where the mode has a use for them."""
        if self.unkeyed != "auto":
            return self.unkeyed == "allow"
        return _is_loopback(self.host) or all(url.startswith("https://") for url in self.upstreams)

    def __repr__(self) -> str:
        return f"GatewayOptions({self.host}:{self.port}, {self.mode})"  # the keys and the URLs are nobody's business


def load_options(path: Path | None, given: Json) -> GatewayOptions:
    """Read a TOML file, if there is one, and put `given` values over it. Raises `ConfigError`."""
    tree: Json = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: there is no such file.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
    tree |= given
    known = [name for name, *_ in fields(GatewayOptions)]
    for name in tree:
        if name not in known:
            raise ConfigError(f"{name}: there is no such key.{_hint(name, tree[name], known)}")
    for name in ("upstream", "store"):
        if not tree.get(name):
            raise ConfigError(f"{name}: give --{name}, or {name} in the file of --config.")
    try:
        return msgspec.convert(tree, GatewayOptions)
    except msgspec.ValidationError as error:
        text, _, place = str(error).replace("`", "").partition(" - at ")
        name = place.removeprefix("$.")
        choices = _choices(name.partition("[")[0])
        if choices:
            raise ConfigError(f"{name}: {tree[name]!r} is none of {', '.join(choices)}.") from None
        raise ConfigError(f"{name or 'options'}: {text[:1].lower()}{text[1:]}.") from None


def _hint(name: str, value: object, known: Sequence[str]) -> str:
    if isinstance(value, dict):
        return " Keys stand at the top of the file, in no [section]."
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _choices(name: str) -> tuple[str, ...]:
    """The values that a field may have, where these are a few words."""
    kind = next((kind for field, kind, *_ in fields(GatewayOptions) if field == name), None)
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(kind) if isinstance(kind, type) and issubclass(kind, StrEnum) else ()


def check_options(options: GatewayOptions) -> Roles:
    """What a type can't say; returns the keys that open ``/admin``. Raises `ConfigError`."""
    public = not _is_loopback(options.host)
    roles = Roles(
        admin=options.admin_key,
        trainer=options.trainer_key,
        grader=options.grader_key,
        read=options.read_key,
        guessable_by=f"{options.host} can be reached from other machines" if public else "",
    )
    if public and not options.admin_key:
        raise ConfigError(
            f"admin_key: {options.host} can be reached from other machines, so choose an admin key "
            "(--admin-key, OUTRIDER_ADMIN_KEY or admin_key in the file), or listen on 127.0.0.1."
        )
    if not options.reward_min < options.reward_max:
        raise ConfigError("reward_min: must be below reward_max.")
    if not options.health_path.startswith("/"):
        raise ConfigError(f"health_path: {options.health_path!r} must begin with a slash.")
    for pattern in options.redact_patterns:
        try:
            matches_nothing = re.compile(pattern).match("") is None
        except re.error as error:
            raise ConfigError(f"redact_patterns: {pattern!r} is not a regular expression: {error}.") from None
        if not matches_nothing:
            raise ConfigError(f"redact_patterns: {pattern!r} matches the empty text, and so everywhere.")
    return roles


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_store(url: str, *, synchronous: Literal["FULL", "NORMAL"] = "FULL") -> Store:
    """The store that a URL names. Raises `ConfigError`, `SetupError`, `StoreError`."""
    # By name, like every plug-in: the gateway imports no store.
    open_by_url = load_attr("outrider.stores.urls:open_store", field="store")
    store: Store = open_by_url(url, synchronous=synchronous)
    return store


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
