"""The open branches of each attempt: every answer that can be gone on from, found by what its conversation means."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.gateway.continuation.answer import Answer
from outrider.gateway.continuation.meaning import Meaning, Talk, follow, meaning_of
from outrider.gateway.continuation.retold import is_read, may_be_read, retellings
from outrider.types import Break, IntArray, Json

_LOOKED_AT = 64  # branches that are compared with a request that continues none


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One answer in its context, as served and sampled."""

    head: bytes
    """Of tools and options: what differs in it changes the prompt before the first message."""
    options: bytes
    """The options alone."""
    meanings: tuple[Meaning, ...]
    """Of its messages; the last one is the answer."""
    prompt_ids: IntArray
    completion_ids: IntArray
    answer: Answer

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def open(self) -> bool:
        """An agent may write it on."""
        return bool(self.answer.stopped) or may_be_read(self.answer.message)


@dataclass(slots=True, eq=False)
class Attempt:
    """The branches of one attempt by the chain that ends with their answer; the newest of equal ones."""

    branches: OrderedDict[bytes, Branch] = field(default_factory=OrderedDict)
    retold: dict[bytes, Branch] = field(default_factory=dict)
    """The same by chains that end with the answer as an agent may retell it."""
    calls: set[str] = field(default_factory=set)
    """Ids of the calls that are in here, or can't be."""
    written_on: dict[bytes, list[Branch]] = field(default_factory=dict)
    """Those that an agent may have written on, by the chain before their answer."""
    read_to: int = 0
    """Sequence number up to which the store was read for it."""

    def find(self, talk: Talk) -> tuple[int, Branch] | None:
        """The longest beginning of `talk` that is a branch, short of all of it: how many messages, and which."""
        for length in range(len(talk.meanings) - 1, 0, -1):
            branch = self.branches.get(talk.chain[length]) or self.retold.get(talk.chain[length])
            if branch is not None:
                return length, branch
        return None

    def find_written_on(self, talk: Talk, messages: Sequence[Json], after: int) -> tuple[int, Branch, str] | None:
        """As `find`, beyond `after` messages, for an answer that the agent wrote on: also what it wrote, if that is to
        stand in the prompt."""
        for at in range(len(messages) - 2, after - 1, -1):
            for branch in reversed(self.written_on.get(talk.chain[at], ())):
                if talk.meanings[at].reasoning == branch.meanings[-1].reasoning:
                    written = _written_on(branch, messages[at])
                    if written is not None:
                        return at + 1, branch, written
        return None

    def add(self, before: bytes, chain: bytes, branch: Branch) -> int:
        """How many tokens there are more now."""
        old = self.branches.pop(chain, None)
        self.branches[chain] = branch
        if old is not None:
            self._unlist(old)
        if branch.open:
            self.written_on.setdefault(before, []).append(branch)
        self.retold |= dict.fromkeys(_retold(before, branch), branch)
        return branch.tokens - (old.tokens if old else 0)

    def drop_oldest(self) -> int:
        """How many tokens there are less now."""
        _, oldest = self.branches.popitem(last=False)
        self._unlist(oldest)
        return oldest.tokens

    def _unlist(self, branch: Branch) -> None:
        if branch.open:
            self.written_on = {
                chain: left
                for chain, all in self.written_on.items()
                if (left := [one for one in all if one is not branch])
            }
        self.retold = {chain: one for chain, one in self.retold.items() if one is not branch}

    def diagnose(self, talk: Talk, messages: Sequence[Json], options: bytes) -> Break | None:
        """Why `talk`, which has answers in it, continues none of the branches; None if it never was one of theirs."""
        best: tuple[int, int, Branch] | None = None
        for age, branch in enumerate(self._newest()):
            shared = _shared(branch.meanings, talk.meanings)
            if best is None or (shared, -age) > best[:2]:
                best = shared, -age, branch
        if best is None:
            return None
        shared, _, branch = best
        if shared == len(branch.meanings):  # all there, so it is the head, or an answer in between is not known
            if branch.head == talk.chain[0]:
                return Break.UNKNOWN
            return Break.OPTIONS_CHANGED if branch.options != options else Break.TOOLS_CHANGED
        theirs, ours = talk.meanings, branch.meanings
        if _system(ours) != _system(theirs) and _common(_rest(ours), _rest(theirs)):
            return Break.SYSTEM_CHANGED
        if shared == 0 or shared >= len(theirs):
            return Break.HISTORY_REWRITTEN if _said_before(ours, theirs) else None
        if ours[shared].reasoning and not theirs[shared].reasoning and _same_but_reasoning(branch, messages, shared):
            return Break.REASONING_DROPPED_BY_HARNESS
        return _changed(ours[shared], theirs[shared])

    def _newest(self) -> Iterator[Branch]:
        for number, branch in enumerate(reversed(self.branches.values())):
            if number == _LOOKED_AT:
                return
            yield branch


class Branches:
    """Of all attempts. Holds at most `max_tokens` token ids: the attempts that were quiet longest are forgotten first.

    What is forgotten can be read again from the store.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._attempts: OrderedDict[str, Attempt] = OrderedDict()
        self._tokens = 0

    def attempt(self, attempt_id: str) -> Attempt:
        found = self._attempts.setdefault(attempt_id, Attempt())
        self._attempts.move_to_end(attempt_id)
        return found

    def add(self, attempt_id: str, before: bytes, chain: bytes, branch: Branch) -> None:
        """`chain` ends with the branch's answer, `before` with the message before it."""
        attempt = self.attempt(attempt_id)
        self._tokens += attempt.add(before, chain, branch)
        while self._tokens > self._max_tokens and len(self._attempts) > 1:
            _, quiet = self._attempts.popitem(last=False)
            self._tokens -= sum(one.tokens for one in quiet.branches.values())
        while self._tokens > self._max_tokens and len(attempt.branches) > 1:
            self._tokens -= attempt.drop_oldest()


def _retold(before: bytes, branch: Branch) -> Iterator[bytes]:
    """Chains that end with its answer as an agent may retell it; `before` stands for all before the answer."""
    for message in retellings(branch.answer.message):
        yield follow(before, meaning_of(message, {}, len(branch.meanings) - 1))


def _shared(ours: Sequence[Meaning], theirs: Sequence[Meaning]) -> int:
    """How many messages are equal from the beginning."""
    count = 0
    for one, other in zip(ours, theirs, strict=False):
        if one.digest != other.digest:
            break
        count += 1
    return count


def _system(meanings: Sequence[Meaning]) -> tuple[bytes, ...]:
    return tuple(one.text for one in meanings[: len(meanings) - len(_rest(meanings))])


def _rest(meanings: Sequence[Meaning]) -> Sequence[Meaning]:
    """Without the system messages at the head."""
    start = next((i for i, one in enumerate(meanings) if one.role not in ("system", "developer")), len(meanings))
    return meanings[start:]


def _common(ours: Sequence[Meaning], theirs: Sequence[Meaning]) -> bool:
    # By text: links to calls count positions, which a system message more or less moves.
    return bool(ours and theirs) and (ours[0].role, ours[0].text) == (theirs[0].role, theirs[0].text)


def _said_before(ours: Sequence[Meaning], theirs: Sequence[Meaning]) -> bool:
    """An answer of ours stands somewhere in theirs."""
    said = {(one.text, one.calls) for one in ours if one.role == "assistant"}
    return any((one.text, one.calls) in said for one in theirs if one.role == "assistant")


def _written_on(branch: Branch, message: Json) -> str | None:
    """What `message` has beyond the branch's answer; empty for what says nothing new, None where it is another."""
    if message["role"] != "assistant" or message.get("tool_calls"):
        return None
    text, answer = message["content"], branch.answer
    if answer.stopped and text.startswith(answer.stopped):
        return str(text[len(answer.stopped) :])
    return "" if may_be_read(answer.message) and is_read(answer.message, text) else None


def _same_but_reasoning(branch: Branch, messages: Sequence[Json], at: int) -> bool:
    """The message there has all that the branch says there but its reasoning, perhaps retold or written on."""
    ours, theirs = branch.meanings[at], meaning_of(messages[at], {}, at)
    if (ours.role, ours.text, ours.calls) == (theirs.role, theirs.text, theirs.calls):
        return True
    if at < len(branch.meanings) - 1:
        return False
    bare = {name: value for name, value in branch.answer.message.items() if name != "reasoning_content"}
    retold = (meaning_of(message, {}, at).digest for message in retellings(bare))
    return theirs.digest in retold or _written_on(branch, messages[at]) is not None


def _changed(ours: Meaning, theirs: Meaning) -> Break:
    # Also where it became a part of the text.
    rewritten = ours.role == theirs.role == "assistant" and ours.calls and ours.calls != theirs.calls
    return Break.CALL_REWRITTEN if rewritten else Break.HISTORY_REWRITTEN
