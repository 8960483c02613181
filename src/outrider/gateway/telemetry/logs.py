"""The gateway's own log: a line for each call that has ended, as JSON or text. Never a body, never a key.

Lines are written by a thread of their own, so that a slow terminal or pipe holds up no call; what does not fit into
the queue is lost and counted.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import IO, Literal

import msgspec

from outrider.gateway.telemetry.note import Note
from outrider.types import CallState, Json

Format = Literal["json", "text"]
Level = Literal["info", "warning", "off"]
MAX_QUEUED = 10_000  # lines


class LogWriter:
    """Writes lines in a thread. `lost` counts those that came too fast."""

    def __init__(self, out: IO[str] | None = None) -> None:
        """`out` is standard error, as it is at the time, where none is given."""
        self.lost = 0
        self._out = out
        self._lines: queue.Queue[Json | str | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: Json | str) -> None:
        """An object becomes a line of JSON."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is queued."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        encode = msgspec.json.Encoder(enc_hook=str).encode
        while (line := self._lines.get()) is not None:
            text = line if isinstance(line, str) else encode(line).decode()
            out = self._out or sys.stderr
            try:
                out.write(text + "\n")
                if self._lines.empty():
                    out.flush()
            except (OSError, ValueError):  # whoever read it has gone
                self.lost += 1


class CallLog:
    """Satisfies `note.Observer`: a line for each call, or with `warning` only for those that did not end well."""

    def __init__(self, writer: LogWriter, *, level: Level, format: Format) -> None:
        self._writer = writer
        self._all = level == "info"
        self._json = format == "json"

    def ended(self, note: Note) -> None:
        well = note.status < 400 and not note.code and (note.call is None or note.call.state is CallState.COMPLETE)
        if well and not self._all:
            return
        told = describe(note, well=well)
        self._writer.put(told if self._json else _as_text(told))


def describe(note: Note, *, well: bool) -> Json:
    call = note.call
    told: Json = {
        "at": datetime.fromtimestamp(note.started_at, UTC).isoformat(timespec="milliseconds"),
        "level": "info" if well else "warning",
        "event": "call",
        "call_id": note.call_id,
        "attempt_id": note.attempt_id,
        "dialect": note.dialect,
        "mode": note.mode,
        "model": note.model,
        "streamed": note.streamed,
        "status": note.status,
        "duration_s": round(note.duration_s, 6),
    }
    if note.code:
        told["code"] = note.code
    if call is not None:
        told |= {
            "state": call.state.value,
            "fidelity": call.fidelity.value,
            "first_token_s": call.first_token_s and round(call.first_token_s, 6),
            "commit_s": round(note.commit_s, 6),
            "prompt_tokens": call.usage and call.usage.prompt_tokens,
            "completion_tokens": call.usage and call.usage.completion_tokens,
            "policy_version": call.version_start,
        }
        if call.fidelity_reason:
            told["fidelity_reason"] = call.fidelity_reason.partition(":")[0]  # the rest may quote an answer
    return told


class LineHandler(logging.Handler):
    """Python's own log records of the gateway as lines of the same form."""

    def __init__(self, writer: LogWriter, *, format: Format) -> None:
        super().__init__()
        self._writer = writer
        self._json = format == "json"

    def emit(self, record: logging.LogRecord) -> None:
        told: Json = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "message",
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = logging.Formatter().formatException(record.exc_info)
        self._writer.put(told if self._json else _as_text(told))


def _as_text(told: Json) -> str:
    head = f"{told['at']} {told['level']} {told['event']}"
    rest = " ".join(
        f"{name}={_quoted(value)}"
        for name, value in told.items()
        if name not in ("at", "level", "event") and value not in ("", None)
    )
    return f"{head} {rest}"


def _quoted(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and not set(' "=') & set(text) else msgspec.json.encode(text).decode()
