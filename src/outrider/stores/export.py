"""Copy the calls of a store into one file for other tools, one row a call: Parquet or JSON Lines.

A row holds the call, and of the attempt it belongs to what is known: rollout, task, split, step, reward. Bodies are
text where they are UTF-8; else base64, and the field ``request_base64`` or ``response_base64`` is true. Fields:

    seq id attempt_id rollout_id task_id group_id split step attempt counted reward dialect model state status streamed
    fidelity fidelity_reason continuation replica retries error prompt_tokens completion_tokens version_start
    version_end started_at duration_s first_token_s sampling prompt_ids choices request request_base64 response
    response_base64

`counted` is false where a later attempt took this one's place; `reward` is the newest of the attempt's rewards named
``final``; `choices` holds index, token_ids, logprobs, finish_reason and versions of each sampled answer (the versions
as runs of `version` and `tokens`, empty where the call's two are all that is to be said); `retries` holds replica,
status, error, duration_s and wait_s of each sending before the last. What is not known is null: the rollout's fields
for production traffic, `counted` too. JSON has no NaN: such a log-prob is null there.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, Protocol

import msgspec

from outrider.errors import ConfigError, StoreError
from outrider.protocols import Store
from outrider.types import Call, Json

Format = Literal["parquet", "jsonl"]

# Calls read at once. Each page is a read of its own, so that no snapshot is held: a SQLite writer goes on recycling
# its WAL however long the export takes. Memory is bounded by the bodies of one page and one Parquet row group.
PAGE = 32
CACHED_ATTEMPTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCounts:
    calls: int
    last_seq: int
    """Give it as `after_seq` next time to get only what came since."""
    size: int
    """Bytes of the file."""
    fidelity: dict[str, int]
    """Calls of each fidelity."""
    base64_bodies: int
    """Bodies that are no UTF-8."""


class RowWriter(Protocol):
    """Takes rows (see the module) and writes them to the file it was given."""

    def write(self, row: Json) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """The file is given up."""


def export_store(
    store: Store,
    out: Path,
    *,
    format: Format | None = None,
    after_seq: int = 0,
    progress: Callable[[int], None] | None = None,
) -> ExportCounts:
    """Write all calls with a sequence number above `after_seq` to `out`, in order, beside running gateways.

    `format` is taken from the suffix where it is not given. `out` appears, or is replaced, when the export is complete;
    until then ``OUT.partial`` grows beside it. An export that was interrupted starts over; to go on where one ended,
    give `after_seq` and another file. `progress` is called after each page with the number of calls written.

    Raises `ConfigError` on a wrong path or format, `SetupError` without pyarrow, `StoreError` where store or disk fail.
    """
    make_writer = _writer(out, format)
    attempts = lru_cache(CACHED_ATTEMPTS)(lambda attempt_id: _attempt_fields(store, attempt_id))
    calls = base64_bodies = 0
    last_seq = after_seq
    fidelity: Counter[str] = Counter()
    with _replaced(out) as file, _finished(make_writer(file)) as writer:
        for page in _pages(store, after_seq):
            for call in page:
                row = _row(call, attempts(call.attempt_id))
                writer.write(row)
                base64_bodies += row["request_base64"] + row["response_base64"]
                fidelity[call.fidelity.value] += 1
            calls += len(page)
            last_seq = page[-1].seq
            if progress is not None:
                progress(calls)
    return ExportCounts(
        calls=calls,
        last_seq=last_seq,
        size=out.stat().st_size,
        fidelity=dict(fidelity),
        base64_bodies=base64_bodies,
    )


class JsonlWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder(enc_hook=lambda array: array.tolist()).encode

    def write(self, row: Json) -> None:
        self._file.write(self._encode(row))
        self._file.write(b"\n")

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def _writer(out: Path, format: Format | None) -> Callable[[IO[bytes]], RowWriter]:
    chosen = format or out.suffix.removeprefix(".")
    if chosen == "jsonl":
        return JsonlWriter
    if chosen == "parquet":
        from outrider.stores.export_parquet import ParquetWriter

        return ParquetWriter
    raise ConfigError(
        f"export: {chosen or out.name!r} is no format; end OUT in .parquet or .jsonl, or name one of them."
    )


def _pages(store: Store, after_seq: int) -> Iterator[list[Call]]:
    """Ends at the first page that is not full, so at the newest call unless writers are faster than we are."""
    while page := store.calls_after(after_seq, limit=PAGE):
        after_seq = page[-1].seq
        yield page
        if len(page) < PAGE:
            return


def _attempt_fields(store: Store, attempt_id: str) -> Json:
    rewards = [reward.value for reward in store.rewards(attempt_id) if reward.name == "final" and not reward.call_id]
    attempt = store.attempt(attempt_id)
    rollout = store.rollout(attempt.rollout_id) if attempt else None
    return {
        "rollout_id": attempt and attempt.rollout_id,
        "task_id": rollout and rollout.task.id,
        "group_id": rollout and rollout.group_id,
        "split": rollout and rollout.split,
        "step": rollout and rollout.step,
        "attempt": attempt and attempt.number,
        "counted": None if attempt is None or rollout is None else attempt.number == rollout.attempt,
        "reward": rewards[-1] if rewards else None,
    }


def _row(call: Call, attempt_fields: Json) -> Json:
    request, request_base64 = _text(call.request)
    response, response_base64 = _text(call.response)
    return {
        "seq": call.seq,
        "id": call.id,
        "attempt_id": call.attempt_id,
        **attempt_fields,
        "dialect": call.dialect,
        "model": call.model,
        "state": call.state.value,
        "status": call.status,
        "streamed": call.streamed,
        "fidelity": call.fidelity.value,
        "fidelity_reason": call.fidelity_reason,
        "continuation": call.continuation,
        "replica": call.replica,
        "retries": [asdict(retry) for retry in call.retries],
        "error": call.error,
        "prompt_tokens": call.usage and call.usage.prompt_tokens,
        "completion_tokens": call.usage and call.usage.completion_tokens,
        "version_start": call.version_start,
        "version_end": call.version_end,
        "started_at": call.started_at,
        "duration_s": call.duration_s,
        "first_token_s": call.first_token_s,
        "sampling": call.sampling,
        "prompt_ids": call.prompt_ids,
        "choices": [_choice(choice) for choice in call.choices],
        "request": request,
        "request_base64": request_base64,
        "response": response,
        "response_base64": response_base64,
    }


def _choice(choice: Any) -> Json:
    return {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
        "versions": [{"version": version, "tokens": tokens} for version, tokens in choice.versions],
    }


def _text(body: bytes) -> tuple[str, bool]:
    try:
        return body.decode(), False
    except UnicodeDecodeError:
        return base64.b64encode(body).decode(), True


@contextlib.contextmanager
def _finished(writer: RowWriter) -> Iterator[RowWriter]:
    try:
        yield writer
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `out` when it is complete and on disk."""
    if out.is_dir() or not out.parent.is_dir():
        raise ConfigError(f"{out}: is a folder, or lies in one that does not exist; name a file.")
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error}.") from error
    finally:
        partial.unlink(missing_ok=True)
