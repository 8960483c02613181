"""Reads a completions answer, and hands it on to a dialect as the chat answer that its ids stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from outrider.gateway.continuation.answer import AnswerStream, chat_logprobs
from outrider.gateway.continuation.request import ChatRequest
from outrider.types import Json
from outrider.wire import ErrorReply, Event, Renderer, ReplyReader, ReplyTokens

_DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")
_OURS = frozenset({"id", "object", "created", "model", "choices", "usage", "prompt_token_ids", "error"})


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _Reply(msgspec.Struct, gc=False):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_reply = msgspec.json.Decoder(_Reply)


class ContinuedReader:
    """Satisfies `wire.ReplyReader`.

    `tokens` reads what the engine sent, and says alone what is recorded as sampled. `inner` is the dialect's, and sees
    a chat answer.
    """

    def __init__(
        self,
        inner: ReplyReader,
        tokens: ReplyReader,
        *,
        renderer: Renderer,
        request: ChatRequest,
        prompt_ids: list[int],
        tells_prompt: bool,
    ) -> None:
        """`tells_prompt`: `inner` learns the length of the prompt from its ids."""
        self._inner = inner
        self._tokens = tokens
        self._renderer = renderer
        self._request = request
        self._prompt_ids = prompt_ids
        self._tells_prompt = tells_prompt
        self._told: list[bytes] = []
        self._error = ""
        self.answers: dict[int, AnswerStream] = {}

    @property
    def terminal(self) -> bool:
        return self._inner.terminal

    @property
    def finished(self) -> bool:
        return self._tokens.finished

    @property
    def error(self) -> str:
        return self._error or self._tokens.error or self._inner.error

    @property
    def response(self) -> bytes:
        """The chat answer so far; empty where there is none."""
        return b"".join(self._told)

    def result(self) -> ReplyTokens:
        found = self._tokens.result()
        if found.prompt_ids is None or not len(found.prompt_ids):
            return replace(found, prompt_ids=list(self._prompt_ids))
        if not np.array_equal(np.asarray(found.prompt_ids), self._prompt_ids) and not found.problem:
            return replace(found, problem="the engine used another prompt than it was sent")
        return found

    def error_body(self, status: int, body: bytes) -> ErrorReply:
        return self._inner.error_body(status, body)

    def end(self) -> bytes:
        return b"" if self._error else self._inner.end()

    def fail(self, status: int, message: str, *, code: str | None = None) -> bytes:
        return self._inner.fail(status, message, code=code)

    # -- plain -----------------------------------------------------------------------------------------------------

    def body(self, body: bytes) -> bytes:
        self._tokens.body(body)
        try:
            reply = _reply.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._error = f"the answer of the engine is not what it should be: {error}"
            problem = {"message": f"Upstream: {self._error}", "type": "server_error", "param": None, "code": None}
            return self._inner.error_body(502, _encode({"error": problem})).body
        if reply.error is not None or reply.choices is None:
            return self._inner.body(body)
        whole = {**_head(reply, "chat.completion", body), "choices": [self._whole(choice) for choice in reply.choices]}
        whole["usage"] = reply.usage
        if self._request.shows_ids:
            whole["prompt_token_ids"] = self._prompt_ids
        self._told = [_encode(whole)]
        return self._inner.body(self._told[0])

    def _whole(self, choice: _Choice) -> Json:
        answer = self._answer(choice.index)
        if choice.token_ids is None:
            answer.message.content.append(choice.text or "")
        else:
            answer.feed(choice.token_ids)
            answer.finish()
        made: Json = {"index": choice.index, "message": answer.message.wire()}
        return {**made, **self._rest(choice), **self._ending(choice, answer)}

    # -- streams ---------------------------------------------------------------------------------------------------

    def event(self, event: Event) -> bytes:
        if self._error:
            return b""  # the agent was told that there is no answer
        self._tokens.event(event)
        if not event.data:
            return self._inner.event(event)
        if event.data == _DONE:
            self._told.append(event.raw)
            return self._inner.event(event)
        try:
            reply = _reply.decode(event.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._error = f"a chunk of the engine's answer is not what it should be: {error}"
            return self._inner.fail(502, f"Upstream: {self._error}")
        if reply.error is not None:
            self._told.append(event.raw)
            return self._inner.event(event)
        head = _head(reply, "chat.completion.chunk", event.data)
        shown = []
        for choice in reply.choices or ():
            shown += [self._tell({**head, "choices": [part]}) for part in self._parts(choice)]
        if not reply.choices and reply.usage is not None:
            shown.append(self._tell({**head, "choices": [], "usage": reply.usage}))
        return shown[0] if len(shown) == 1 else b"".join(shown)

    def _tell(self, chunk: Json) -> bytes:
        if self._tells_prompt:
            chunk["prompt_token_ids"] = self._prompt_ids
            self._tells_prompt = False
        data = _encode(chunk)
        raw = b"data: " + data + b"\n\n"
        self._told.append(raw)
        return self._inner.event(Event(raw, data))

    def _parts(self, choice: _Choice) -> list[Json]:
        """The deltas that a chunk of one choice makes, each a choice of a chunk of its own."""
        answer = self._answer(choice.index)
        deltas: list[Json] = []
        if not answer.started:
            answer.started = True
            deltas.append({"role": "assistant", "content": ""})
        if choice.token_ids is None and choice.text:
            answer.message.content.append(choice.text)
            deltas.append({"content": choice.text})
        told = answer.feed(choice.token_ids or ())
        if told:
            deltas.append(told)
        if choice.finish_reason is not None and (told := answer.finish()):
            deltas.append(told)
        rest = self._rest(choice)
        if not deltas and (choice.finish_reason is not None or rest["logprobs"] or "token_ids" in rest):
            deltas.append({})
        parts = [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if parts:
            parts[-1] |= {**rest, **self._ending(choice, answer)}
        return parts

    # -- both ------------------------------------------------------------------------------------------------------

    def _answer(self, index: int) -> AnswerStream:
        found = self.answers.get(index)
        if found is None:
            found = self.answers[index] = AnswerStream(self._renderer, self._request, self._prompt_ids, index)
        return found

    def _rest(self, choice: _Choice) -> Json:
        """What only an agent sees that asked for it."""
        top = self._request.top_logprobs
        rest: Json = {"logprobs": None if top is None else chat_logprobs(choice.logprobs, top)}
        if self._request.shows_ids:
            rest["token_ids"] = choice.token_ids
        return rest

    def _ending(self, choice: _Choice, answer: AnswerStream) -> Json:
        if choice.finish_reason is None:
            return {"finish_reason": None}
        return {"finish_reason": answer.finish_reason(choice.finish_reason), "stop_reason": choice.stop_reason}


def _head(reply: _Reply, kind: str, data: bytes) -> Json:
    """With the fields of `data`, the reply's text, that only the engine knows, as they stand there."""
    name = reply.id if reply.id.startswith("chat") else "chat" + reply.id
    own = {name: raw for name, raw in _fields.decode(data).items() if name not in _OURS and raw != _NULL}
    return {**own, "id": name, "object": kind, "created": reply.created, "model": reply.model}
