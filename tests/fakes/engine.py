"""A scripted engine: OpenAI-compatible HTTP on a real socket, with vLLM's token fields, faults and delays on demand.

    with ScriptedEngine() as engine:
        engine.answers.append(Answer(status=503))     # the next request gets this, later ones the default
        ...
        engine.received[0].json["temperature"]

The default answer honours `stream`, `n`, `return_token_ids`, `logprobs` and `stream_options` as vLLM does.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

from fakes.ports import claim

Json = dict[str, Any]
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}
JSON_HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Received:
    """One request as the engine saw it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the engine does with one request. `chunks` are written to the socket one by one."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_HEADERS))
    chunks: Sequence[bytes] = ()
    delay_s: float = 0.0
    """Before the status line."""
    chunk_delay_s: float = 0.0
    """Before each chunk but the first."""
    end: Literal["clean", "reset", "hang"] = "clean"
    gate: threading.Event | None = None
    """If given, the last chunk waits for it."""
    head_gate: threading.Event | None = None
    """If given, the status line waits for it."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What the model says in one choice: pieces of text, each with its id and log-prob."""

    pieces: Sequence[str] = ("Hel", "lo ", "wörld", "!", "")
    ids: Sequence[int] = (11, 12, 13, 14, 2)
    logprobs: Sequence[float] = (-0.5, -0.25, -0.125, -1.5, -0.0625)
    finish_reason: str = "stop"
    tool_calls: Sequence[Json] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ScriptedEngine:
    """Serves from a thread of its own until closed."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque()
        self.received: list[Received] = []
        self.aborted: int
        """Requests whose client left before the answer ended."""
        self.served: int
        self.sampled: list[Sampled]
        """Choices of the default answer, used in turn."""
        self.prompt_ids: list[int]
        self.delay_s: float
        """Before every default answer."""
        self.healthy: bool
        """What ``/health`` says; `probes` counts who asked."""
        self.probes: int
        self.forget()
        self.port = 0
        self._claim: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted engine", daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """As new, for the next test."""
        self.answers.clear()
        self.received.clear()
        self.aborted = self.served = 0
        self.sampled = [Sampled()]
        self.prompt_ids = [1, 2, 3]
        self.delay_s = 0.0
        self.healthy = True
        self.probes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._claim is not None:
            self._claim.close()

    def stop(self) -> None:
        """Close the port and all connections; `start` opens the same port again."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        assert self._runner.server is not None
        if self._claim is None:
            self._claim = claim(self.port)
            self.port = self._claim.getsockname()[1]
        self._server = await self._loop.create_server(self._runner.server, "127.0.0.1", self.port)

    async def _stop(self) -> None:
        if self._runner is None or self._server is None:
            return
        # When a server closes, asyncio leaks what it has accepted and not yet given to a protocol. So no more is
        # accepted now, and the server closes some rounds of the loop later.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        for _ in range(10):
            await asyncio.sleep(0)
        self._server.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            self.probes += 1
            return web.Response(status=200 if self.healthy else 503)
        received = Received(
            method=request.method,
            path=request.path,
            query=request.rel_url.raw_query_string,
            headers={name.lower(): value for name, value in request.headers.items()},
            body=await request.read(),
        )
        self.received.append(received)
        if received.path.startswith("/v1/models"):
            return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
        answer = self.answers.popleft() if self.answers else self.default(received)
        try:
            response = await self._write(request, answer)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        self.served += 1
        return response

    async def _write(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        await asyncio.sleep(answer.delay_s)
        if answer.head_gate is not None:
            await asyncio.to_thread(answer.head_gate.wait, 60)
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        for number, chunk in enumerate(answer.chunks):
            if number:
                await asyncio.sleep(answer.chunk_delay_s)
            if answer.gate is not None and number == len(answer.chunks) - 1:
                await asyncio.to_thread(answer.gate.wait, 60)
            await response.write(chunk)
        if answer.end == "hang":
            await asyncio.sleep(3600)
        if answer.end == "reset" and request.transport is not None:
            request.transport.abort()
        else:
            await response.write_eof()
        return response

    def default(self, received: Received) -> Answer:
        if received.path not in ("/v1/chat/completions", "/v1/completions"):
            return json_answer({"detail": "Not Found"}, status=404)
        chat = received.path == "/v1/chat/completions"
        asked = received.json
        sampled = [self.sampled[i % len(self.sampled)] for i in range(asked.get("n") or 1)]
        identity = f"cmpl-{len(self.received)}-{asked.get('user', '')}"
        reply = Reply(asked=asked, chat=chat, sampled=sampled, prompt_ids=self.prompt_ids, id=identity)
        if asked.get("stream"):
            return Answer(headers=dict(SSE_HEADERS), chunks=sse(*reply.chunks()), delay_s=self.delay_s)
        return json_answer(reply.body(), delay_s=self.delay_s)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Builds vLLM-shaped replies to what was `asked`."""

    asked: Json
    chat: bool
    sampled: Sequence[Sampled]
    prompt_ids: Sequence[int]
    id: str

    def body(self) -> Json:
        choices = [self._choice(index, sampled) for index, sampled in enumerate(self.sampled)]
        reply = {**self._head(""), "choices": choices, "usage": self.usage()}
        if self.chat and self.asked.get("return_token_ids"):
            reply["prompt_token_ids"] = list(self.prompt_ids)
        return reply

    def chunks(self) -> list[Json]:
        ids = bool(self.asked.get("return_token_ids"))
        found = []
        if self.chat:
            roles = [
                {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                for i in range(len(self.sampled))
            ]
            first = {**self._head(".chunk"), "choices": roles}
            found.append(first | {"prompt_token_ids": list(self.prompt_ids)} if ids else first)
        for index, sampled in enumerate(self.sampled):
            last = len(sampled.ids) - 1
            for at in range(len(sampled.ids)):
                choice: Json = {"index": index, "logprobs": self._logprobs(sampled, at, at + 1)}
                if self.chat:
                    choice["delta"] = {"content": sampled.pieces[at]}
                    if at == last and sampled.tool_calls:
                        calls = [{"index": i, **call} for i, call in enumerate(sampled.tool_calls)]
                        choice["delta"]["tool_calls"] = calls
                else:
                    choice["text"] = sampled.pieces[at]
                    if ids and at == 0:
                        choice["prompt_token_ids"] = list(self.prompt_ids)
                choice["finish_reason"] = sampled.finish_reason if at == last else None
                if ids:
                    choice["token_ids"] = [sampled.ids[at]]
                found.append({**self._head(".chunk"), "choices": [choice]})
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            found.append({**self._head(".chunk"), "choices": [], "usage": self.usage()})
        return found

    def usage(self) -> Json:
        completion = sum(len(sampled.ids) for sampled in self.sampled)
        prompt = len(self.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": 1764500000, "model": self.asked.get("model", "")}

    def _choice(self, index: int, sampled: Sampled) -> Json:
        choice: Json = {"index": index, "finish_reason": sampled.finish_reason, "stop_reason": None}
        choice["logprobs"] = self._logprobs(sampled, 0, len(sampled.ids))
        if self.chat:
            choice["message"] = {"role": "assistant", "content": sampled.text, "x_future": {"a": 1}}
            if sampled.tool_calls:
                choice["message"]["tool_calls"] = list(sampled.tool_calls)
        else:
            choice["text"] = sampled.text
        if self.asked.get("return_token_ids"):
            choice["token_ids"] = list(sampled.ids)
            if not self.chat:
                choice["prompt_token_ids"] = list(self.prompt_ids)
        return choice

    def _logprobs(self, sampled: Sampled, start: int, end: int) -> Json | None:
        if self.asked.get("logprobs") in (None, False):
            return None
        pieces, values = sampled.pieces[start:end], sampled.logprobs[start:end]
        if self.chat:
            entries = [
                {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, value in zip(pieces, values, strict=True)
            ]
            return {"content": entries}
        return {"tokens": list(pieces), "token_logprobs": list(values), "top_logprobs": [], "text_offset": []}


def json_answer(body: Json, *, status: int = 200, delay_s: float = 0.0) -> Answer:
    return Answer(status=status, chunks=[json.dumps(body).encode()], delay_s=delay_s)


def sse(*chunks: Json, done: bool = True) -> list[bytes]:
    """Wire chunks of a stream, one event each."""
    events = [b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks]
    return [*events, b"data: [DONE]\n\n"] if done else events


def stream(*chunks: Json, done: bool = True, **options: Any) -> Answer:
    return Answer(headers=dict(SSE_HEADERS), chunks=sse(*chunks, done=done), **options)


def raw_stream(*chunks: bytes, **options: Any) -> Answer:
    """A stream of exactly these writes."""
    return Answer(headers=dict(SSE_HEADERS), chunks=chunks, **options)


def gzipped(answer: Answer) -> Answer:
    """The same answer with Content-Encoding gzip, each chunk flushed."""
    packer = zlib.compressobj(wbits=31)
    chunks = [packer.compress(chunk) + packer.flush(zlib.Z_SYNC_FLUSH) for chunk in answer.chunks]
    chunks[-1] += packer.flush()
    return Answer(
        status=answer.status,
        headers={**answer.headers, "content-encoding": "gzip"},
        chunks=chunks,
        delay_s=answer.delay_s,
        chunk_delay_s=answer.chunk_delay_s,
        gate=answer.gate,
    )


# -- parts of hand-made replies ----------------------------------------------------------------------------------------


def chunk(delta: Json, **fields: Any) -> Json:
    """A streamed chunk with one choice."""
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **fields}]}


def entries(*values: float | None) -> Json:
    """Chat log-probs."""
    return {"content": [{"token": "t", "logprob": value} for value in values]}


def usage(prompt: int, completion: int) -> Json:
    """The usage chunk."""
    numbers = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "c", "choices": [], "usage": numbers}


def plain(choice: Json, prompt_ids: Sequence[int | None] | None = (1, 2), completion: int = 2, **fields: Any) -> Answer:
    """A whole chat reply with one choice."""
    numbers = {"prompt_tokens": len(prompt_ids or ()), "completion_tokens": completion, "total_tokens": 0}
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", **choice}
    return json_answer({"id": "c", "choices": [choice], "usage": numbers, "prompt_token_ids": prompt_ids, **fields})
