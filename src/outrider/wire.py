"""The seams at the wire: protocols the gateway speaks and the chat format of a model. `protocols` has those of a run.

All of it is synchronous and free of I/O; the gateway calls it from its event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import error as StructError
from struct import pack
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from outrider.types import Break, IntArray, Json, Runs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRequest:
    """An agent's request body, parsed once."""

    body: bytes
    """As the agent sent it."""
    fields: Mapping[str, msgspec.Raw]
    """Its top-level keys; each value is the agent's own JSON text, so that what we don't know survives."""
    model: str
    stream: bool
    sampling: Json
    """The sampling parameters that the agent named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRequest:
    """What goes upstream for a `WireRequest`."""

    body: bytes
    sampling: Json
    """Sampling parameters in force, after overrides."""
    hidden: frozenset[str] = frozenset()
    """Fields of the reply that only the gateway asked for, in the dialect's own words."""
    path: str = ""
    """Where it goes, in place of the path that the agent asked for; empty where that one stands."""
    model: str = ""
    """The agent's own name of the model, for the reply, where another one went upstream; empty where none did."""
    notes: tuple[str, ...] = ()
    """What of the request could not go upstream, each a short kind, a colon and a name."""


class ErrorReply(NamedTuple):
    """What an agent gets where the upstream answered with an error."""

    status: int
    body: bytes
    streamed: bool = False
    """The body is an event stream that tells of the error: some clients understand no other form."""


class Event(NamedTuple):
    """One server-sent event."""

    raw: bytes
    """Every byte of it, the blank line included."""
    data: bytes
    """Its ``data`` lines joined by a newline; empty for a comment."""
    name: bytes = b""


@dataclass(slots=True, kw_only=True)
class SampledChoice:
    """One answer as the upstream reported it, unchecked: lengths may differ and entries may be missing."""

    index: int
    token_ids: list[int | None] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    versions: Runs = ()
    """As the engine said which policy versions sampled them; empty where it didn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyTokens:
    """What a reply said about its tokens, unchecked; the gateway decides the call's fidelity from it."""

    prompt_ids: list[int | None] | IntArray | None
    """There are many, and they wait for the commit: an array takes a tenth of a list's memory."""
    choices: tuple[SampledChoice, ...]
    usage: Usage | None
    problem: str = ""
    """What could not be read, if anything."""


def id_array(ids: Sequence[int | None]) -> IntArray | None:
    """`ids` as int32, shape (T,); None where an entry is null or none of its numbers."""
    try:
        return np.frombuffer(pack(f"{len(ids)}i", *ids), dtype=np.int32)  # numpy takes twice as long for a list
    except StructError:
        return None


class ReplyReader(Protocol):
    """Takes in one reply, whole or event by event. Never raises on what an upstream sent: `result` tells of it.

    The events that end an answer are held back until the call is recorded: `end` is called once the upstream's stream
    has ended, and `fail` instead of it or after it, where what was held back is not sent after all.
    """

    @property
    def terminal(self) -> bool:
        """The protocol's last event was read."""

    @property
    def finished(self) -> bool:
        """There is a choice, and each one has its finish reason: the model has no more to say."""

    @property
    def error(self) -> str:
        """What the upstream said, where it sent an error inside a 200; else empty."""

    def body(self, body: bytes) -> bytes:
        """Read a whole body. Returns what the agent gets: the same object where there is nothing to hide."""

    def event(self, event: Event) -> bytes:
        """Read one event. Returns what the agent gets: ``event.raw``, other bytes, or nothing."""

    def end(self) -> bytes:
        """What the agent is still owed at the end of the upstream's stream."""

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """An error event that fits what was sent so far; empty where the agent was told of one already."""

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        """What the agent gets for an answer with an error status: the same bytes where nothing is translated."""

    def result(self) -> ReplyTokens: ...


class Dialect(Protocol):
    """A wire protocol that the gateway speaks to agents."""

    @property
    def name(self) -> str: ...

    @property
    def routes(self) -> tuple[str, ...]:
        """Paths of the model endpoints, such as ``/v1/chat/completions``."""

    @property
    def translated(self) -> bool:
        """The upstream doesn't speak it: requests become chat completions, and answers are made from theirs."""

    def parse(self, body: bytes) -> WireRequest:
        """Raises `RequestError`, with a message for the agent."""

    def prepare(
        self,
        request: WireRequest,
        *,
        overrides: Json,
        tokens: bool,
        model: str = "",
        owner: str = "",
        call_id: str = "",
    ) -> UpstreamRequest:
        """Put `overrides` over the agent's sampling parameters and, with `tokens`, ask for token ids and log-probs.

        `model` goes upstream in place of the agent's name for it. `owner` is who asks, such as an attempt: no other
        owner's earlier answers can be named. `call_id` is what an answer is named after, where its id is ours to give.
        With no overrides, tokens or model the agent's bytes go as they are,
        unless the dialect is translated. Raises `RequestError`.
        """

    def reader(self, request: UpstreamRequest) -> ReplyReader:
        """A reader for the reply to `request`."""

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
        """An error body in the protocol's own shape."""


@runtime_checkable
class TokenCounter(Dialect, Protocol):
    """A dialect with a route that says how long a prompt is, over an upstream that has none."""

    @property
    def count_route(self) -> str: ...

    def count_request(self, body: bytes, *, model: str = "") -> UpstreamRequest:
        """The request whose answer tells it, for a body of `count_route`. Raises `RequestError`."""

    def count_reply(self, status: int, body: bytes) -> ErrorReply:
        """What the agent gets for the upstream's answer to `count_request`, be it the number or an error."""


@runtime_checkable
class Recaller(Dialect, Protocol):
    """A dialect whose requests may name an earlier answer instead of sending it again, over an upstream that has none.

    It remembers the answers that its readers have read, of each owner apart (see `Dialect.prepare`). Thread-safe.
    """

    def names(self, request: WireRequest) -> Sequence[str]:
        """Ids of the calls whose answers `request` names, in whole or in part, as far as they could be ours."""

    def knows(self, owner: str, call_id: str) -> bool: ...


class ParsedCall(NamedTuple):
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """Its JSON to the byte."""
    id: str = ""
    """Where the model's format has one."""


class ReplyDelta(NamedTuple):
    """A part of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ParsedCall, ...] = ()


class ReplyParser(Protocol):
    """Makes an answer of its sampled ids. Joined, the parts are the same however the ids were cut."""

    def feed(self, token_ids: Sequence[int]) -> ReplyDelta:
        """What is certain now."""

    def finish(self) -> ReplyDelta:
        """The rest, once no more ids come."""


class Renderer(Protocol):
    """A model's chat format: messages to token ids, sampled ids to an answer. Thread-safe.

    Messages are in the shape of chat completions, the content a string, reasoning under ``reasoning_content``, a tool
    call's arguments the text that the agent sent. `options` are those of ``chat_template_kwargs``.
    """

    @property
    def joint(self) -> str:
        """What stands between the text parts of one message."""

    def reads(self, *, calls: bool) -> bool:
        """Its parsers take in what this model writes: answers in text, and with `calls` those with calls in them."""

    def head(self, tools: Sequence[Json], options: Json) -> Json:
        """Those of them that show in a prompt: two requests with the same head differ in their messages alone."""

    def render(self, messages: Sequence[Json], tools: Sequence[Json], options: Json) -> list[int]:
        """Ids of a prompt. Control tokens that a user or a tool spells are plain pieces. Raises `RequestError`."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        history: Sequence[Json],
        reply: Json,
        new: Sequence[Json],
        tools: Sequence[Json],
        options: Json,
        *,
        written: str = "",
    ) -> list[int] | Break:
        """Ids of the prompt for `history`, `reply`, `new`; they begin with `prompt_ids`, `completion_ids`.

        These are the ids of `history` and `reply` as they were served and sampled, but for the end of `reply` that the
        agent has `written` behind what was sampled. Says why where that can't be done.
        """

    def begin(
        self,
        prompt_ids: Sequence[int],
        kept: int,
        messages: Sequence[Json],
        begun: str,
        tools: Sequence[Json],
        options: Json,
    ) -> list[int] | None:
        """`prompt_ids`, which are those for `messages`, with the beginning of the answer, which an agent wrote.

        The first `kept` of them stay as they are. None where the format gives no proof of how that is done.
        """

    def parser(self, prompt_ids: Sequence[int], tools: Sequence[Json], *, begun: str = "") -> ReplyParser:
        """For an answer to `prompt_ids`; calls are looked for where there are `tools`. What `begin` was given as
        `begun` is a part of the answer, and is not told again."""
