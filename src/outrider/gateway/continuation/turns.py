"""Decides for each call which branch it goes on with, and keeps the branches.

continued           the prompt is a branch's ids plus those of the new messages
opened              a conversation that was not seen before, or is none of an answer's
broke: <cause>      the agent goes on with a conversation, and its tokens can't be: a new branch is opened
engine: <why>       the prompt can't be made here, so the engine renders it

Behind a semicolon stands what else there is to say: that the agent had forced a tool call, and what the model said when
it was asked freely.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.errors import RequestError
from outrider.gateway.continuation.answer import Answer, begun_by, parse_answer
from outrider.gateway.continuation.branches import Branch, Branches
from outrider.gateway.continuation.meaning import Talk, digest, follow, meaning_of, read_talk
from outrider.gateway.continuation.reader import ContinuedReader
from outrider.gateway.continuation.request import (
    BEGUN,
    COMPLETIONS_PATH,
    LEFT,
    ChatRequest,
    LeftToEngine,
    completions_body,
    read_chat,
)
from outrider.gateway.continuation.told import told_answers
from outrider.gateway.sessions import owner_of
from outrider.gateway.telemetry.counters import Counters
from outrider.protocols import Store
from outrider.types import Break, Call, CallState, Fidelity
from outrider.wire import Dialect, Renderer, ReplyReader, UpstreamRequest

log = logging.getLogger("outrider.gateway")

CHAT_PATH = "/v1/chat/completions"
MAX_TOKENS = 16_000_000  # 64 MB of ids
FREE, FREE_UNMADE = "a forced tool call, left free", "a forced tool call, left free and not made"

# Names of `UpstreamRequest.hidden`.
_TOKEN_IDS, _LOGPROBS = "token_ids", "logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, read for what it means."""

    request: ChatRequest
    talk: Talk
    head: bytes
    options: bytes


class _Found(NamedTuple):
    """The beginning of a request that is a branch."""

    length: int
    """Messages, the branch's answer being the last of them."""
    branch: Branch
    written: str = ""
    """What the agent wrote on behind the answer."""


class Turn:
    """One call whose prompt was made here."""

    def __init__(
        self, continuation: Continuation, attempt_id: str, asked: Asked, prompt_ids: list[int], outcome: str
    ) -> None:
        self.prompt_ids = prompt_ids
        self._outcome = outcome
        self._continuation = continuation
        self._attempt_id = attempt_id
        self._asked = asked
        self._reader: ContinuedReader | None = None

    @property
    def path(self) -> str:
        return COMPLETIONS_PATH

    @property
    def outcome(self) -> str:
        """How the prompt came about, and what became of a call that the agent had forced."""
        if not self._asked.request.forced:
            return self._outcome
        unmade = self._reader is not None and self._reader.finished and not all(self._made())
        return f"{self._outcome}; {FREE_UNMADE if unmade else FREE}"

    def _made(self) -> list[bool]:
        """Of each answer: it has a call that the agent forced."""
        streams = self._reader.answers.values() if self._reader is not None else ()
        forced = self._asked.request.forced
        return [any(call["function"]["name"] in forced for call in stream.message.calls) for stream in streams]

    def body(self) -> bytes:
        return completions_body(self._asked.request, self.prompt_ids)

    def reader(self, inner: ReplyReader, prepared: UpstreamRequest) -> ContinuedReader:
        """Around the dialect's own reader."""
        self._reader = self._continuation.reader(inner, prepared, self._asked.request, self.prompt_ids)
        return self._reader

    def response(self, raw: bytes) -> bytes:
        """What is recorded as the upstream's body: the chat answer, where there is one."""
        return (self._reader.response if self._reader is not None else b"") or raw

    def committed(self, call: Call) -> None:
        """The call is durable, and its answers can be gone on from."""
        self._continuation.count(self._attempt_id, self._outcome)
        if self._asked.request.forced and call.state is CallState.COMPLETE:
            self._continuation.count_forced(self._made())
        if self._reader is not None:
            answers = {index: stream.answer() for index, stream in self._reader.answers.items()}
            self._continuation.keep(self._attempt_id, call, self._asked, answers)


class Continuation:
    """Lives on one event loop."""

    def __init__(
        self,
        renderer: Renderer,
        store: Store,
        dialects: Sequence[Dialect],
        completions: Dialect,
        counters: Counters,
        *,
        frees_calls: bool = True,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """`dialects` are those of recorded calls; `completions` reads what the engine answers to ids. `frees_calls`: a
        tool call that an agent forces is sampled as any other answer, else the engine is to force it."""
        self._renderer = renderer
        self._store = store
        self._dialects = {dialect.name: dialect for dialect in dialects}
        self._completions = completions
        self._counters = counters
        self._frees_calls = frees_calls
        self._branches = Branches(max_tokens)

    async def turn(self, attempt_id: str, prepared: UpstreamRequest, target: bytes) -> tuple[Turn | None, str]:
        """None where the engine is to render the prompt, and why. Raises `RequestError`, and `StoreError`."""
        if (prepared.path or target.partition(b"?")[0].decode("latin-1")) != CHAT_PATH:
            return None, ""
        try:
            asked = self._read(prepared)
            prompt_ids, outcome = await self._prompt(attempt_id, asked)
        except LeftToEngine as reason:
            return None, str(reason)
        return Turn(self, attempt_id, asked, prompt_ids, outcome), ""

    async def count_prompt(self, attempt_id: str, asked: UpstreamRequest) -> int | None:
        """How many tokens the prompt of such a call has; None where the engine is to render it."""
        try:
            return len((await self._prompt(attempt_id, self._read(asked)))[0])
        except LeftToEngine:
            return None

    def reader(
        self, inner: ReplyReader, prepared: UpstreamRequest, request: ChatRequest, prompt_ids: list[int]
    ) -> ContinuedReader:
        tokens = self._completions.reader(UpstreamRequest(body=b"", sampling={}))
        return ContinuedReader(
            inner,
            tokens,
            renderer=self._renderer,
            request=request,
            prompt_ids=prompt_ids,
            tells_prompt=bool(prepared.path) or request.shows_ids,
        )

    def count(self, attempt_id: str, outcome: str) -> None:
        self._counters.continuation(outcome)
        if outcome.startswith("broke"):
            log.warning("attempt %s: %s; a new branch is opened", attempt_id, outcome)

    def count_forced(self, made: Sequence[bool]) -> None:
        for one in made:
            self._counters.forced_tools(made=one)

    def keep(self, attempt_id: str, call: Call, asked: Asked, answers: dict[int, Answer]) -> None:
        """Open the branches that end with `answers`, by index of their choice."""
        self._branches.attempt(attempt_id).calls.add(call.id)
        for chain, branch in _branches_of(call, asked, answers):
            self._branches.add(attempt_id, asked.talk.chain[-1], chain, branch)

    # -- the prompt ------------------------------------------------------------------------------------------------

    async def _prompt(self, attempt_id: str, asked: Asked) -> tuple[list[int], str]:
        """Raises `LeftToEngine`, and `RequestError`."""
        request = asked.request
        found = self._find(attempt_id, asked)
        if _misses(found, asked.talk):
            await self._recall(attempt_id)
            found = self._find(attempt_id, asked)
        cause: Break | None
        if found is not None and not _misses(found, asked.talk):
            extended = self._extend(request, found)
            if not isinstance(extended, Break):
                return self._begin(extended, found.branch.tokens, request), "continued"
            cause = extended
        else:
            answered = any(one.role == "assistant" for one in asked.talk.meanings)
            attempt = self._branches.attempt(attempt_id)
            cause = attempt.diagnose(asked.talk, request.messages, asked.options) if answered else None
        # The whole history: long enough for others to wait, so not on the event loop.
        prompt_ids = await asyncio.to_thread(self._renderer.render, request.messages, request.tools, request.options)
        return self._begin(prompt_ids, 0, request), "opened" if cause is None else f"broke: {cause}"

    def _find(self, attempt_id: str, asked: Asked) -> _Found | None:
        attempt = self._branches.attempt(attempt_id)
        known = attempt.find(asked.talk)
        found = None if known is None else _Found(*known)
        if _misses(found, asked.talk):
            on = attempt.find_written_on(asked.talk, asked.request.messages, found.length if found else 0)
            found = found if on is None else _Found(*on)
        return found

    def _extend(self, request: ChatRequest, found: _Found) -> list[int] | Break:
        branch, messages = found.branch, request.messages
        return self._renderer.extend(
            branch.prompt_ids.tolist(),
            branch.completion_ids.tolist(),
            messages[: found.length - 1],
            branch.answer.message,  # which the agent may have retold
            messages[found.length :],
            request.tools,
            request.options,
            written=found.written,
        )

    def _begin(self, prompt_ids: list[int], kept: int, request: ChatRequest) -> list[int]:
        """The same with the beginning of the answer, if the agent wrote one. Raises `LeftToEngine`."""
        if not request.begun:
            return prompt_ids
        begun = self._renderer.begin(prompt_ids, kept, request.messages, request.begun, request.tools, request.options)
        if begun is None:
            raise LeftToEngine(BEGUN)
        return begun

    async def _recall(self, attempt_id: str) -> None:
        """Read the calls of the attempt that another gateway served, or this one before it was started again."""
        attempt = self._branches.attempt(attempt_id)
        found, read_to = await asyncio.to_thread(self._recorded, attempt_id, set(attempt.calls), attempt.read_to)
        if self._branches.attempt(attempt_id) is attempt:  # not forgotten in the meantime
            attempt.read_to = max(attempt.read_to, read_to)
        for call, asked, answers in found:
            if call.id not in self._branches.attempt(attempt_id).calls:
                self.keep(attempt_id, call, asked, answers)

    def _recorded(
        self, attempt_id: str, known: set[str], after: int
    ) -> tuple[list[tuple[Call, Asked, dict[int, Answer]]], int]:
        """The calls beyond `after` that are not `known`, and up to where they need not be read again."""
        found: list[tuple[Call, Asked, dict[int, Answer]]] = []
        read_to, unclear = after, False
        for call in self._store.calls(attempt_id, after):
            read_to = read_to if unclear else call.seq
            dialect = self._dialects.get(call.dialect)
            if call.id in known or dialect is None or not _usable(call) or call.prompt_ids is None:
                continue
            try:
                request = dialect.parse(call.request)
                owner = owner_of(attempt_id)  # it may name an earlier answer, which the dialect has been told by now
                prepared = dialect.prepare(request, overrides={}, tokens=True, owner=owner, call_id=call.id)
                asked = self._read(prepared, answered=True)
            except LeftToEngine:
                continue
            except RequestError:  # it names an answer that the dialect may be told of later
                read_to, unclear = (read_to if unclear else call.seq - 1), True
                continue
            found.append((call, asked, self._answers(call, asked.request)))
        return found, read_to

    def _answers(self, call: Call, request: ChatRequest) -> dict[int, Answer]:
        """The answers of a recorded call, as they were told, by index of their choice."""
        if not call.continuation or call.continuation.startswith(LEFT):
            told = told_answers(call.response).items()
            return {index: Answer(begun_by(request.begun, message)) for index, message in told}
        assert call.prompt_ids is not None
        prompt_ids = call.prompt_ids.tolist()
        return {
            choice.index: parse_answer(self._renderer, request, prompt_ids, choice.index, choice.token_ids.tolist())
            for choice in call.choices
        }

    def _read(self, prepared: UpstreamRequest, *, answered: bool = False) -> Asked:
        shows_ids, shows_logprobs = _TOKEN_IDS not in prepared.hidden, _LOGPROBS not in prepared.hidden
        request = read_chat(
            prepared.body,
            shows_ids=shows_ids,
            shows_logprobs=shows_logprobs,
            joint=self._renderer.joint,
            frees_calls=self._frees_calls,
            answered=answered,
        )
        if not self._renderer.reads(calls=request.parses_calls):
            raise LeftToEngine("answers in a form that is not known here")
        options = self._renderer.head([], request.options)["options"]
        head = digest(self._renderer.head(request.tools, request.options))
        return Asked(request=request, talk=read_talk(head, request.messages), head=head, options=digest(options))


def _misses(found: _Found | None, talk: Talk) -> bool:
    """There are answers in `talk` beyond the branch that was found."""
    return any(one.role == "assistant" for one in talk.meanings[found.length if found else 0 :])


def _usable(call: Call) -> bool:
    return call.state is CallState.COMPLETE and call.fidelity is Fidelity.EXACT


def _branches_of(call: Call, asked: Asked, answers: dict[int, Answer]) -> list[tuple[bytes, Branch]]:
    if not _usable(call) or call.prompt_ids is None:
        return []
    made = []
    for choice in call.choices:
        answer = answers.get(choice.index)
        if answer is None or not len(choice.token_ids):
            continue
        meaning = meaning_of(answer.message, {}, len(asked.talk.meanings))
        branch = Branch(
            head=asked.head,
            options=asked.options,
            meanings=(*asked.talk.meanings, meaning),
            prompt_ids=call.prompt_ids,
            completion_ids=choice.token_ids,
            answer=answer,
        )
        made.append((follow(asked.talk.chain[-1], meaning), branch))
    return made
