"""What a call tells of itself when it has ended: for metrics, the log and traces. It holds no body and no key."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic, time
from typing import Protocol

from outrider.types import Call

CLIENT_GONE = "client_gone"


@dataclass(slots=True)
class Note:
    """Filled in as the call goes on; read once it has ended."""

    call_id: str = ""
    dialect: str = ""
    mode: str = ""
    """Of its session, or the gateway's own; empty where the caller was not let in."""
    attempt_id: str = ""
    model: str = ""
    streamed: bool = False
    kept: bool = False
    """It is to be recorded."""
    call: Call | None = None
    """As it was recorded."""
    commit_s: float = 0.0
    """What it waited for the store."""
    status: int = 0
    """What the agent got; 0 where it left before."""
    code: str = ""
    """What went wrong, in a word."""
    duration_s: float = 0.0
    parent: bytes | None = None
    """The agent's ``traceparent`` header."""
    started_at: float = field(default_factory=time)
    _began: float = field(default_factory=monotonic)

    def end(self, status: int) -> None:
        self.status = status
        self.duration_s = monotonic() - self._began

    @property
    def dropped(self) -> bool:
        """It was answered, and is not in the store though it should be. This never happens."""
        return self.kept and self.call is None and not self.code and 200 <= self.status < 300


class Observer(Protocol):
    """Told of each model call when it has ended, on the event loop: it must be quick and never raise."""

    def ended(self, note: Note) -> None: ...
