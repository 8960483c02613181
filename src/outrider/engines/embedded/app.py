"""The HTTP side: OpenAI's routes and the control routes, on starlette. Computing is the scheduler's thread's work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.engines.embedded.model import Model
from outrider.engines.embedded.requests import ApiError, Limits, Parsed, parse_body, parse_chat, parse_completion
from outrider.engines.embedded.scheduler import Deliveries, Scheduler
from outrider.engines.embedded.sequences import Failed, Job, Update
from outrider.engines.embedded.vocabulary import Vocabulary
from outrider.engines.embedded.wire import Wire
from outrider.errors import ConfigError
from outrider.types import Json

log = logging.getLogger("outrider.engine")

VERSION_HEADER = "x-outrider-policy-version"
VERSION_END_HEADER = "x-outrider-policy-version-end"
IGNORED_HEADER = "x-outrider-ignored"
MAX_WAITING = 4096
"""Requests that may wait for an answer to begin; one more is turned away with 503."""

Handler = Callable[[Request], Awaitable[Response]]


class Courier:
    """Carries news from the scheduler's thread into the event loop: one wake-up a step, however many requests."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, news: Deliveries) -> None:
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self.loop.call_soon_threadsafe(_hand_over, news)


def _hand_over(news: Deliveries) -> None:
    for job, item in news:
        job.deliver(item)


class Service:
    """The routes. One for each server."""

    def __init__(
        self, *, model: Model, vocabulary: Vocabulary, scheduler: Scheduler, courier: Courier, limits: Limits, seed: int
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._courier = courier
        self._limits = limits
        self._seeds = random.Random(seed)
        self._loading = asyncio.Lock()
        self._open = 0
        self._warned: set[str] = set()

    def app(self) -> Starlette:
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
            ("GET", "/v1/models", self._models),
            ("GET", "/health", self._health),
            ("GET", "/control/version", self._version),
            ("GET", "/control/stats", self._stats),
            ("POST", "/control/load_weights", self._load_weights),
            ("POST", "/control/pause", self._pause),
            ("POST", "/control/resume", self._resume),
            ("POST", "/control/reset_prefix_cache", self._reset_prefix_cache),
        ]
        return Starlette(
            routes=[Route(path, handler, methods=[method]) for method, path, handler in routes],
            lifespan=self._lifespan,
            exception_handlers={ApiError: _api_error, 404: _http_error, 405: _http_error, 500: _server_error},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._courier.loop = asyncio.get_running_loop()
        self._scheduler.start()
        yield
        self._scheduler.close()
        await asyncio.to_thread(self._scheduler.join, 10.0)

    async def _chat(self, request: Request) -> Response:
        body = parse_body(await request.body())
        return await self._generate(request, parse_chat(body, self._vocabulary, self._limits))

    async def _completion(self, request: Request) -> Response:
        body = parse_body(await request.body())
        return await self._generate(request, parse_completion(body, self._vocabulary, self._limits))

    async def _generate(self, request: Request, parsed: Parsed) -> Response:
        if self._open >= MAX_WAITING:
            raise ApiError("Too many requests are waiting; try again later.", status=503, code="overloaded")
        news: asyncio.Queue[Update | Failed] = asyncio.Queue()
        seed = parsed.sampling.seed if parsed.sampling.seed is not None else self._seeds.getrandbits(63)
        ignored = self._ignored(parsed)
        job = Job(parsed.prompts, parsed.sampling, parsed.n, stream=parsed.stream, seed=seed, deliver=news.put_nowait)
        wire = Wire(parsed, self._limits.model, self._vocabulary)
        self._open += 1
        self._scheduler.submit(job)
        streaming = False
        try:
            # The first news decides the status, so a stream is not opened before its first token.
            first = await _unless_gone(request, news.get())
            if first is None:
                return _gone()
            headers = {VERSION_HEADER: str(_checked(first).versions[0][0]), **ignored}
            if parsed.stream:
                events = self._stream(job, news, first, wire)
                streaming = True
                return _EventStream(events, headers, on_end=lambda: self._scheduler.cancel(job))
            updates = [_checked(first)]
            while len(updates) < len(job.sequences):
                update = await _unless_gone(request, news.get())
                if update is None:
                    return _gone()
                updates.append(_checked(update))
            updates.sort(key=lambda update: update.index)
            headers[VERSION_HEADER] = str(min(update.versions[0][0] for update in updates))
            headers[VERSION_END_HEADER] = str(max(update.versions[-1][0] for update in updates))
            return _json(wire.plain(updates), headers=headers)
        finally:
            self._open -= 1
            if not streaming:
                self._scheduler.cancel(job)  # harmless where it has ended

    def _ignored(self, parsed: Parsed) -> dict[str, str]:
        """A header that says which wishes cannot be forced; the log says it once for each."""
        new = set(parsed.ignored) - self._warned
        if new:
            self._warned |= new
            log.warning("%s: left to the model, this engine cannot force it", ", ".join(sorted(new)))
        return {IGNORED_HEADER: ", ".join(parsed.ignored)} if parsed.ignored else {}

    async def _stream(
        self, job: Job, news: asyncio.Queue[Update | Failed], first: Update | Failed, wire: Wire
    ) -> AsyncIterator[bytes]:
        left = len(job.sequences)
        item = first
        for chunk in wire.opening():
            yield _event(chunk)
        while True:
            if isinstance(item, Failed):
                yield _event(ApiError(item.message, status=item.status).body)
                return
            found = wire.chunk(item)
            if found is not None:
                yield _event(found)
            left -= item.finish_reason is not None
            if not left:
                break
            item = await news.get()
        closing = wire.closing()
        if closing is not None:
            yield _event(closing)
        yield b"data: [DONE]\n\n"

    async def _models(self, _: Request) -> Response:
        model = {"id": self._limits.model, "object": "model", "created": 0, "owned_by": "outrider"}
        model["max_model_len"] = self._limits.max_model_len
        return _json({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        return _json({"status": "ok", "version": self._scheduler.version})

    async def _version(self, _: Request) -> Response:
        return _json({"version": self._scheduler.version})

    async def _stats(self, _: Request) -> Response:
        return await self._on_thread(self._scheduler.stats)

    async def _pause(self, _: Request) -> Response:
        return await self._on_thread(self._scheduler.pause)

    async def _resume(self, _: Request) -> Response:
        return await self._on_thread(self._scheduler.resume)

    async def _reset_prefix_cache(self, _: Request) -> Response:
        await asyncio.wrap_future(self._scheduler.call(self._scheduler.reset_prefix_cache))
        return await self._on_thread(self._scheduler.stats)

    async def _load_weights(self, request: Request) -> Response:
        """Read and check beside the running steps, swap between two of them."""
        body = parse_body(await request.body())
        path, version = body.get("path"), body.get("version")
        if not isinstance(path, str) or not path:
            raise ApiError("path: must name a Hugging Face folder with weights.", param="path")
        if type(version) is not int or version < 0:
            raise ApiError("version: must be a whole number of at least 0.", param="version")
        async with self._loading:
            try:
                weights = await asyncio.to_thread(self._model.read, Path(path))
            except ConfigError as error:
                raise ApiError(str(error), param="path", code="weights_refused") from error
            await asyncio.wrap_future(self._scheduler.call(lambda: self._scheduler.swap(weights, version)))
        return _json({"version": version})

    async def _on_thread(self, function: Callable[[], Json]) -> Response:
        return _json(await asyncio.wrap_future(self._scheduler.call(function)))


class _EventStream(StreamingResponse):
    """Calls `on_end` however it ends: also when the client left before the first event was asked for."""

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def _checked(item: Update | Failed) -> Update:
    if isinstance(item, Failed):
        raise ApiError(item.message, status=item.status)
    return item


async def _unless_gone(request: Request, waiting: Awaitable[Any]) -> Any | None:
    """What `waiting` gives, or None if the client leaves first."""
    answer = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _gone() -> Response:
    return Response(status_code=499)  # nobody reads it


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body, error.status, {"retry-after": "1"} if error.status == 503 else None)


async def _http_error(request: Request, error: Exception) -> Response:
    status = int(getattr(error, "status_code", 404))
    text = f"{request.method} {request.url.path}: " + ("no such route." if status == 404 else "method not allowed.")
    return _json(ApiError(text, status=status).body, status)


async def _server_error(_: Request, __: Exception) -> Response:
    return _json(ApiError("the engine failed to handle the request", status=500).body, 500)
