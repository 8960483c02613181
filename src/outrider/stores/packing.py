"""Records to columns and back, for stores that keep rows: zstd bodies, packed token ids and log-probs, JSON text.

A row is a tuple in the order of the matching ``..._COLUMNS``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import zstandard

from outrider.types import (
    Attempt,
    Call,
    CallState,
    Choice,
    Failure,
    Fidelity,
    FloatArray,
    IntArray,
    Mode,
    Retry,
    Reward,
    Rollout,
    RolloutState,
    Runs,
    Session,
    Task,
    Usage,
)

Row = tuple[Any, ...]

CALL_COLUMNS = (
    "id", "attempt_id", "dialect", "model", "state", "status", "streamed", "prompt_tokens", "completion_tokens",
    "fidelity", "fidelity_reason", "sampling", "version_start", "version_end", "started_at", "duration_s",
    "first_token_s", "error", "choices", "prompt_ids", "token_ids", "logprobs", "request", "response",
    "continuation", "replica", "retries", "versions",
)  # fmt: skip
REWARD_COLUMNS = ("attempt_id", "name", "value", "reason", "parts", "source", "created_at", "call_id")
SESSION_COLUMNS = ("key_hash", "attempt_id", "mode", "sampling", "allow_feedback", "expires_at", "sealed")
ROLLOUT_COLUMNS = (
    "id", "task_id", "task_fields", "group_id", "split", "step", "mode", "sampling", "state", "attempt", "reward",
    "failure", "reason",
)  # fmt: skip
ATTEMPT_COLUMNS = (
    "id", "rollout_id", "number", "started_at", "ended_at", "exit_code", "signal", "timed_out", "failure", "reason",
    "stdout_tail", "stderr_tail",
)  # fmt: skip

_retries = msgspec.json.Decoder(tuple[Retry, ...])
_versions = msgspec.json.Decoder(list[Runs])

LEVEL = 1  # the level that costs least CPU; higher ones gain little on JSON


class Bodies:
    """zstd in both directions. Not thread-safe: one for each thread or connection."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, body: bytes) -> bytes:
        return self._compressor.compress(body) if body else b""

    def unpack(self, blob: bytes) -> bytes:
        return self._decompressor.decompress(blob) if blob else b""


def call_row(call: Call, bodies: Bodies) -> Row:
    usage = call.usage
    choices = [
        (
            choice.index,
            len(choice.token_ids),
            len(choice.logprobs),
            None if choice.finish_reason is None else _text(choice.finish_reason),
        )
        for choice in call.choices
    ]
    return (
        call.id,
        call.attempt_id,
        call.dialect,
        _text(call.model),
        call.state,
        call.status,
        call.streamed,
        usage.prompt_tokens if usage else None,
        usage.completion_tokens if usage else None,
        call.fidelity,
        _text(call.fidelity_reason),
        _json(call.sampling),
        call.version_start,
        call.version_end,
        call.started_at,
        call.duration_s,
        call.first_token_s,
        _text(call.error),
        _json(choices),
        None if call.prompt_ids is None else _pack_ids(call.prompt_ids),
        b"".join(_pack_ids(choice.token_ids) for choice in call.choices),
        b"".join(_pack_floats(choice.logprobs) for choice in call.choices),
        bodies.pack(call.request),
        bodies.pack(call.response),
        call.continuation,
        call.replica,
        _json(call.retries) if call.retries else "",
        _pack_versions(call.choices),
    )


def call_from(row: Row, bodies: Bodies) -> Call:
    """`row` is ``(seq, *CALL_COLUMNS)``."""
    (
        seq, id, attempt_id, dialect, model, state, status, streamed, prompt_tokens, completion_tokens, fidelity,
        fidelity_reason, sampling, version_start, version_end, started_at, duration_s, first_token_s, error, choices,
        prompt_ids, token_ids, logprobs, request, response, continuation, replica, retries, versions,
    ) = row  # fmt: skip
    return Call(
        id=id,
        attempt_id=attempt_id,
        dialect=dialect,
        model=model,
        state=CallState(state),
        status=status,
        streamed=bool(streamed),
        request=bodies.unpack(request),
        response=bodies.unpack(response),
        prompt_ids=None if prompt_ids is None else _ids(prompt_ids),
        choices=_choices(choices, _ids(token_ids), _floats(logprobs), versions),
        usage=None
        if prompt_tokens is None
        else Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens),
        fidelity=Fidelity(fidelity),
        fidelity_reason=fidelity_reason,
        sampling=msgspec.json.decode(sampling),
        version_start=version_start,
        version_end=version_end,
        started_at=started_at,
        duration_s=duration_s,
        first_token_s=first_token_s,
        error=error,
        continuation=continuation,
        replica=replica,
        retries=_retries.decode(retries) if retries else (),
        seq=seq,
    )


def _pack_versions(choices: tuple[Choice, ...]) -> str:
    """Empty where no choice has any, which is nearly always so."""
    for choice in choices:
        if choice.versions:
            return _json([choice.versions for choice in choices])
    return ""


def _choices(text: str, token_ids: IntArray, logprobs: FloatArray, versions: str) -> tuple[Choice, ...]:
    found: list[Choice] = []
    runs = _versions.decode(versions) if versions else []
    ids_at = logprobs_at = 0
    for index, ids_count, logprobs_count, finish_reason in msgspec.json.decode(text):
        found.append(
            Choice(
                index=index,
                token_ids=token_ids[ids_at : ids_at + ids_count],
                logprobs=logprobs[logprobs_at : logprobs_at + logprobs_count],
                finish_reason=finish_reason,
                versions=runs[len(found)] if runs else (),
            )
        )
        ids_at += ids_count
        logprobs_at += logprobs_count
    return tuple(found)


def reward_row(reward: Reward) -> Row:
    return (
        reward.attempt_id,
        _text(reward.name),
        reward.value,
        _text(reward.reason),
        _json(reward.parts),
        _text(reward.source),
        reward.created_at,
        reward.call_id,
    )


def reward_from(row: Row) -> Reward:
    attempt_id, name, value, reason, parts, source, created_at, call_id = row
    return Reward(
        attempt_id=attempt_id,
        name=name,
        value=value,
        reason=reason,
        parts=msgspec.json.decode(parts),
        source=source,
        created_at=created_at,
        call_id=call_id,
    )


def session_row(session: Session) -> Row:
    sampling = _json(session.sampling)
    allow_feedback, sealed = session.allow_feedback, session.sealed
    return session.key_hash, session.attempt_id, session.mode, sampling, allow_feedback, session.expires_at, sealed


def session_from(row: Row) -> Session:
    key_hash, attempt_id, mode, sampling, allow_feedback, expires_at, sealed = row
    return Session(
        key_hash=key_hash,
        attempt_id=attempt_id,
        mode=Mode(mode),
        sampling=msgspec.json.decode(sampling),
        allow_feedback=bool(allow_feedback),
        expires_at=expires_at,
        sealed=bool(sealed),
    )


def rollout_row(rollout: Rollout) -> Row:
    return (
        rollout.id,
        rollout.task.id,
        _json(rollout.task.fields),
        rollout.group_id,
        rollout.split,
        rollout.step,
        rollout.mode,
        _json(rollout.sampling),
        rollout.state,
        rollout.attempt,
        rollout.reward,
        rollout.failure,
        _text(rollout.reason),
    )


def rollout_from(row: Row) -> Rollout:
    id, task_id, fields, group_id, split, step, mode, sampling, state, attempt, reward, failure, reason = row
    return Rollout(
        id=id,
        task=Task(id=task_id, fields=msgspec.json.decode(fields)),
        group_id=group_id,
        split=split,
        step=step,
        mode=Mode(mode),
        sampling=msgspec.json.decode(sampling),
        state=RolloutState(state),
        attempt=attempt,
        reward=reward,
        failure=Failure(failure),
        reason=reason,
    )


def attempt_row(attempt: Attempt) -> Row:
    values = (getattr(attempt, column) for column in ATTEMPT_COLUMNS)
    return tuple(_text(value) if type(value) is str else value for value in values)


def attempt_from(row: Row) -> Attempt:
    values = dict(zip(ATTEMPT_COLUMNS, row, strict=True))
    values |= {"timed_out": bool(values["timed_out"]), "failure": Failure(values["failure"])}
    return Attempt(**values)


def _text(value: str) -> str:
    """As UTF-8 can hold it, which no half surrogate is. Others say such things: an upstream in an error that only
    Python's parser reads, a harness on its standard output."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _pack_ids(ids: IntArray) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def _pack_floats(values: FloatArray) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _ids(blob: bytes) -> IntArray:
    return np.frombuffer(blob, dtype="<i4").astype(np.int32, copy=False)


def _floats(blob: bytes) -> FloatArray:
    return np.frombuffer(blob, dtype="<f4").astype(np.float32, copy=False)
