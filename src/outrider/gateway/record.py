"""A call in the making: what was asked, what came, when, under which policy version."""

from __future__ import annotations

import time

from outrider.gateway.capture import capture
from outrider.gateway.continuation.request import left_to_engine
from outrider.gateway.continuation.turns import Turn
from outrider.gateway.sessions import Access
from outrider.gateway.telemetry.note import CLIENT_GONE
from outrider.gateway.versions import Arrived, versions_of
from outrider.types import UPSTREAM_STATUS, Call, CallState, Retry
from outrider.wire import Dialect, ReplyReader, UpstreamRequest, WireRequest


class CallRecord:
    """Filled in as the call goes on, from `begin` on; `finish` makes the `Call` of it."""

    def __init__(
        self,
        *,
        id: str,
        dialect: Dialect,
        access: Access,
        request: WireRequest,
        prepared: UpstreamRequest,
        turn: Turn | None,
        left: str,
    ) -> None:
        """`turn` is there where the gateway has made the prompt itself; `left` says why it could not, if it tried."""
        self.id = id
        self.dialect = dialect
        self.access = access
        self.prepared = prepared
        self.turn = turn
        self.reader: ReplyReader = dialect.reader(prepared)
        if turn is not None:
            self.reader = turn.reader(self.reader, prepared)
        self.state = CallState.COMPLETE
        self.status = 200
        self.response = b""
        self.error = ""
        self.code = ""
        """The same in a word, for the log: `error` may quote an answer."""
        self.first_token_s: float | None = None
        self.finished = False
        """`finish` was called."""
        self.arrives = False
        """The answer comes as a stream."""
        self.replica = ""
        self.retries: tuple[Retry, ...] = ()
        self._request = request
        self._left = left
        self._version_start: int | None = None
        self._arrived: Arrived = ()
        self._started_at = 0.0
        self._began = 0.0

    @property
    def streams(self) -> bool:
        """The agent asked for a stream."""
        return self._request.stream

    @property
    def begun(self) -> bool:
        """It was sent."""
        return self._began > 0

    def begin(self, *, version: int | None) -> None:
        """It goes upstream now, under this policy version; perhaps not for the first time."""
        self._version_start, self._arrived = version, ()
        if not self.begun:
            self._started_at = time.time()
            self._began = time.monotonic()

    def published(self, version: int | None) -> None:
        """New weights are served from now on; `version` was current until now."""
        if version is not None:
            counts = {choice.index: len(choice.token_ids) for choice in self.reader.result().choices}
            self._arrived = (*self._arrived, (version, counts))

    def first_token(self) -> None:
        """The first event with data came."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self._began

    def failed(self, error: str, *, code: str = "upstream_error") -> None:
        """Without a `code` the upstream tells of it itself, inside an answer."""
        self.state = CallState.FAILED
        self.error = error
        self.code = code

    def refused(self, status: int) -> None:
        """The upstream answered with an error status."""
        self.failed(f"{UPSTREAM_STATUS}{status}", code=f"upstream_{status}")

    def cancelled(self) -> None:
        self.state = CallState.CANCELLED
        self.error = "the client left"
        self.code = CLIENT_GONE

    def interrupted(self, status: int) -> None:
        """`status` is what the agent got; 0 where it got none."""
        self.status = status
        self.state = CallState.INTERRUPTED
        self.error = "the gateway was stopped"
        self.code = "stopped"

    def _continuation(self) -> str:
        if self.turn is not None:
            return self.turn.outcome
        return left_to_engine(self._left, self._request.body) if self.access.ours else ""

    def finish(self, *, version: int | None) -> Call:
        """`version` is the policy version now, at the end."""
        self.finished = True
        failure = "" if self.state is CallState.COMPLETE else self.error or self.state.value
        reply = self.reader.result()
        arrived = self._arrived if self.arrives else None
        versions = versions_of(reply.choices, start=self._version_start, end=version, arrived=arrived)
        captured = capture(reply, failure=failure, versions=versions)
        return Call(
            id=self.id,
            attempt_id=self.access.attempt_id,
            dialect=self.dialect.name,
            model=self._request.model,
            state=self.state,
            status=self.status,
            streamed=self._request.stream,
            request=self._request.body,
            response=self.response if self.turn is None else self.turn.response(self.response),
            prompt_ids=captured.prompt_ids,
            choices=captured.choices,
            usage=captured.usage,
            fidelity=captured.fidelity,
            fidelity_reason=captured.reason,
            sampling=self.prepared.sampling,
            version_start=self._version_start,
            version_end=version if versions is None else versions.end,
            started_at=self._started_at,
            duration_s=time.monotonic() - self._began,
            first_token_s=self.first_token_s,
            error=self.error,
            continuation=self._continuation(),
            replica=self.replica,
            retries=self.retries,
        )
