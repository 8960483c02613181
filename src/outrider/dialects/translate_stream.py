"""One chat-completions answer, plain or streamed, put in order.

Chat streams may mix text, reasoning and several tool calls in any order; the protocols that are translated to show one
block after the other. `ChatAnswer` takes chunks in and says what to show: open a block, add to it, close it.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from outrider.dialects.translate import dumps
from outrider.types import Json

# Engines don't agree on a name; some send the same text under two of them.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# What answers of OpenAI have. Anything else is the engine's own, and for the client.
SPOKEN = frozenset({
    "id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint", "metadata",
    "moderation", "obfuscation", "error",
})  # fmt: skip
PROMPT_IDS = "prompt_token_ids"


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    REFUSAL = "refusal"
    CALL = "call"


class Piece(NamedTuple):
    text: str
    logprobs: list[Json]


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one kind. For a tool call the text is its arguments."""

    kind: Kind
    index: int = -1
    """Position among the blocks shown; -1 before it is."""
    call_id: str = ""
    name: str = ""
    pieces: list[Piece] = field(default_factory=list)
    shown: int = 0
    """How many of its pieces were shown."""
    closed: bool = False
    judged: int = -1
    """How many pieces it had when it was last found incomplete, so that this is not tried for each chunk."""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[Json]:
        return [entry for piece in self.pieces for entry in piece.logprobs]


class Act(Enum):
    OPEN = "open"
    ADD = "add"
    CLOSE = "close"


class Step(NamedTuple):
    act: Act
    block: Block
    piece: Piece = Piece("", [])


@dataclass(slots=True)
class Counts:
    """Token counts as the upstream gave them, so far."""

    prompt: int | None = None
    cached: int = 0
    completion: int | None = None
    reasoning: int | None = None


class ChatAnswer:
    """Reads the first choice of one answer: the protocols that are translated here know no ``n``.

    A block is closed once another has begun and it is complete itself: at once for text, for a tool call when its
    arguments parse. So interleaved calls come out one after the other, whole.
    """

    def __init__(self, seed: str, *, shows_ids: bool = False) -> None:
        """`seed` makes the ids of calls that came without one unique. `shows_ids`: the client asked for token ids."""
        self.blocks: list[Block] = []
        """Those shown, in order."""
        self.counts = Counts()
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """The stop string that ended it, where the engine says so."""
        self.extras: Json = {}
        """Fields of the answer that OpenAI doesn't know, as the engine sent them."""
        self.created = 0
        self.error = ""
        """What the upstream said, where it sent an error inside a 200."""
        self.problem = ""
        """What the upstream sent that makes no sense; the answer must not be taken for a good one."""
        self._seed = seed
        self._spoken = SPOKEN if shows_ids else SPOKEN | {PROMPT_IDS}
        self._queue: deque[Block] = deque()
        self._newest: Block | None = None
        self._calls: list[Block] = []
        self._by_index: dict[int, Block] = {}
        self._deltas = 0

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def output_tokens(self) -> int:
        """As the upstream counted them; else how many deltas came, which is about the same."""
        return self._deltas if self.counts.completion is None else self.counts.completion

    # -- in --------------------------------------------------------------------------------------------------------

    def chunk(self, chunk: Json) -> list[Step]:
        """Take in one event of a stream."""
        self._take_head(chunk)
        for choice in _objects(chunk.get("choices")):
            if choice.get("index") not in (0, None):
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._take_delta(delta, choice)
            self._take_end(choice)
        return self._advance()

    def whole(self, response: Json) -> list[Step]:
        """Take in a plain answer."""
        return [*self.chunk(as_chunk(response)), *self.end()]

    def end(self) -> list[Step]:
        """There is no more to come: close what is open."""
        steps = self._advance()
        while self._queue:
            block = self._queue[0]
            if block.index < 0:
                self.problem = self.problem or "a tool call without a name"
                self._queue.popleft()
            else:
                steps.append(self._close())
            steps += self._advance()
        return steps

    def _take_head(self, chunk: Json) -> None:
        self.extras |= {name: value for name, value in chunk.items() if name not in self._spoken and value is not None}
        if chunk.get("error") is not None:
            self.error = _error_text(chunk["error"])
        created = chunk.get("created")
        if not self.created and isinstance(created, int):
            self.created = created
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        if self.counts.prompt is None:
            ids = chunk.get(PROMPT_IDS)
            for choice in _objects(chunk.get("choices")):
                ids = ids or choice.get(PROMPT_IDS)
            if isinstance(ids, list) and ids:
                self.counts.prompt = len(ids)

    def _take_usage(self, usage: Json) -> None:
        counts = self.counts
        counts.prompt = _count(usage.get("prompt_tokens"), counts.prompt)
        counts.completion = _count(usage.get("completion_tokens"), counts.completion)
        prompt, completion = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
        if isinstance(prompt, dict):
            counts.cached = _count(prompt.get("cached_tokens"), counts.cached) or 0
        if isinstance(completion, dict):
            counts.reasoning = _count(completion.get("reasoning_tokens"), counts.reasoning)

    def _take_end(self, choice: Json) -> None:
        if choice.get("finish_reason") is not None:
            self.finish_reason = str(choice["finish_reason"])
        if isinstance(choice.get("stop_reason"), str):  # vLLM's; a number there is a token id
            self.stop_string = choice["stop_reason"]

    def _take_delta(self, delta: Json, choice: Json) -> None:
        for name in REASONING_FIELDS:
            text = delta.get(name)
            if isinstance(text, str) and text:
                self._add(Kind.REASONING, text, [])
                break
        content = delta.get("content")
        if isinstance(content, str) and content:
            self._add(Kind.TEXT, content, _logprobs(choice))
        refusal = delta.get("refusal")
        if isinstance(refusal, str) and refusal:
            self._add(Kind.REFUSAL, refusal, [])
        for call in _objects(delta.get("tool_calls")):
            self._take_call(call)

    def _add(self, kind: Kind, text: str, logprobs: list[Json]) -> None:
        self._deltas += 1
        block = self._newest
        if block is None or block.kind is not kind:
            block = self._begin(Block(kind))
        block.pieces.append(Piece(text, logprobs))

    def _begin(self, block: Block) -> Block:
        self._queue.append(block)
        self._newest = block
        return block

    # -- tool calls ------------------------------------------------------------------------------------------------

    def _take_call(self, delta: Json) -> None:
        self._deltas += 1
        function = delta.get("function")
        function = function if isinstance(function, dict) else {}
        name, arguments = _text(function.get("name")), function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = dumps(arguments)
        block = self._call_of(delta.get("index"), _text(delta.get("id")), name)
        if block is not None:
            block.name = block.name or name
        if not arguments:
            return
        if block is None or (block.closed and arguments.strip()):
            self.problem = self.problem or "arguments of a tool call that never began or was complete"
        elif not block.closed:
            block.pieces.append(Piece(arguments, []))

    def _call_of(self, index: Any, id: str, name: str) -> Block | None:
        """The call that a delta belongs to, begun if it is a new one; None where there is no telling."""
        latest = self._calls[-1] if self._calls else None
        known = self._by_index.get(index) if isinstance(index, int) else latest
        if known is not None and (not id or not known.call_id or id == known.call_id):
            known.call_id = known.call_id or id
            return known
        namesake = next((call for call in self._calls if id and call.call_id == id), None)
        if namesake is not None and not name:
            return namesake
        if not id and not name:
            return None
        # No id, or one that is taken, would leave the agent with calls that it can't tell apart.
        block = Block(Kind.CALL, call_id=id if namesake is None else "", name=name)
        self._begin(block)
        self._calls.append(block)
        if isinstance(index, int):
            self._by_index[index] = block
        return block

    # -- out -------------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Step]:
        steps: list[Step] = []
        while self._queue:
            block = self._queue[0]
            if block.index < 0:
                if block.kind is Kind.CALL and not block.name:
                    break
                steps.append(self._open(block))
            steps += [Step(Act.ADD, block, piece) for piece in block.pieces[block.shown :]]
            block.shown = len(block.pieces)
            if len(self._queue) == 1 or not _is_complete(block):
                break
            steps.append(self._close())
        return steps

    def _open(self, block: Block) -> Step:
        block.index = len(self.blocks)
        self.blocks.append(block)
        if block.kind is Kind.CALL and not block.call_id:
            block.call_id = f"call_{self._seed}_{block.index}"
        return Step(Act.OPEN, block)

    def _close(self) -> Step:
        block = self._queue.popleft()
        block.closed = True
        return Step(Act.CLOSE, block)


def _is_complete(block: Block) -> bool:
    if block.kind is not Kind.CALL:
        return True
    if block.judged == len(block.pieces):
        return False
    block.judged = len(block.pieces)
    try:
        json.loads(block.text)
    except (ValueError, RecursionError):
        return False
    return True


def as_chunk(response: Json) -> Json:
    """A plain answer as the only chunk of a stream."""
    choices = []
    for choice in _objects(response.get("choices"))[:1]:
        message = choice.get("message")
        choices.append({**choice, "index": 0, "delta": _numbered(message) if isinstance(message, dict) else None})
    return {**response, "choices": choices}


def _numbered(message: Json) -> Json:
    """A plain answer's message; its calls are whole, so each is a call of its own, whatever its id."""
    calls = _objects(message.get("tool_calls"))
    return {**message, "tool_calls": [{**call, "index": index} for index, call in enumerate(calls)]}


def _logprobs(choice: Json) -> list[Json]:
    logprobs = choice.get("logprobs")
    return _objects(logprobs.get("content")) if isinstance(logprobs, dict) else []


def _objects(value: Any) -> list[Json]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) else otherwise


def _error_text(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the upstream sent an error without a message")
