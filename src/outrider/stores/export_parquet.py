"""Rows of an export (see `export`) as a Parquet file, one row group at a time."""

from __future__ import annotations

import contextlib
from typing import IO, Any

import msgspec
import numpy as np

from outrider.errors import SetupError
from outrider.types import Json

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SetupError("Parquet needs pyarrow: pip install 'outrider[export]'; or export to JSONL.") from error

# Rows are kept until they come to this much text and tokens: few large row groups read fastest, but all of one is
# in memory.
ROW_GROUP_BYTES = 32 << 20
ROW_GROUP_ROWS = 4096

_RUN = pa.struct({"version": pa.int64(), "tokens": pa.int64()})
_CHOICE = pa.struct(
    {
        "index": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "finish_reason": pa.string(),
        "versions": pa.list_(_RUN),
    }
)
_RETRY = pa.struct(
    {
        "replica": pa.string(),
        "status": pa.int64(),
        "error": pa.string(),
        "duration_s": pa.float64(),
        "wait_s": pa.float64(),
    }
)
SCHEMA = pa.schema(
    {
        "seq": pa.int64(),
        "id": pa.string(),
        "attempt_id": pa.string(),
        "rollout_id": pa.string(),
        "task_id": pa.string(),
        "group_id": pa.string(),
        "split": pa.string(),
        "step": pa.int64(),
        "attempt": pa.int64(),
        "counted": pa.bool_(),
        "reward": pa.float64(),
        "dialect": pa.string(),
        "model": pa.string(),
        "state": pa.string(),
        "status": pa.int64(),
        "streamed": pa.bool_(),
        "fidelity": pa.string(),
        "fidelity_reason": pa.string(),
        "continuation": pa.string(),
        "replica": pa.string(),
        "retries": pa.list_(_RETRY),
        "error": pa.string(),
        "prompt_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "version_start": pa.int64(),
        "version_end": pa.int64(),
        "started_at": pa.float64(),
        "duration_s": pa.float64(),
        "first_token_s": pa.float64(),
        "sampling": pa.string(),  # JSON: any keys
        "prompt_ids": pa.list_(pa.int32()),
        "choices": pa.list_(_CHOICE),
        "request": pa.string(),
        "request_base64": pa.bool_(),
        "response": pa.string(),
        "response_base64": pa.bool_(),
    }
)


class ParquetWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._writer = pq.ParquetWriter(file, SCHEMA, compression="zstd")
        self._rows: list[Json] = []
        self._size = 0

    def write(self, row: Json) -> None:
        ids = 0 if row["prompt_ids"] is None else row["prompt_ids"].nbytes
        ids += sum(choice["token_ids"].nbytes + choice["logprobs"].nbytes for choice in row["choices"])
        self._rows.append(row)
        self._size += len(row["request"]) + len(row["response"]) + ids
        if self._size >= ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS:
            self._write_group()

    def finish(self) -> None:
        if self._rows:
            self._write_group()
        self._writer.close()

    def abandon(self) -> None:
        # Left open, it would write its footer when it is collected, into a file that is closed by then.
        with contextlib.suppress(Exception):
            self._writer.close()

    def _write_group(self) -> None:
        rows, self._rows, self._size = self._rows, [], 0
        arrays = [_column(field, [row[field.name] for row in rows]) for field in SCHEMA]
        self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))


def _column(field: Any, values: list[Any]) -> Any:
    if field.name == "sampling":
        values = [msgspec.json.encode(value).decode() for value in values]
    elif field.name == "prompt_ids":
        return _lists(values, pa.int32())
    elif field.name == "choices":
        choices = [choice for value in values for choice in value]
        columns = [
            pa.array([choice["index"] for choice in choices], pa.int32()),
            _lists([choice["token_ids"] for choice in choices], pa.int32()),
            _lists([choice["logprobs"] for choice in choices], pa.float32()),
            pa.array([choice["finish_reason"] for choice in choices], pa.string()),
            pa.array([choice["versions"] for choice in choices], pa.list_(_RUN)),
        ]
        return pa.ListArray.from_arrays(_offsets(values), pa.StructArray.from_arrays(columns, fields=list(_CHOICE)))
    return pa.array(values, field.type)


def _lists(arrays: list[Any], kind: Any) -> Any:
    """A column of lists from numpy arrays, without a Python object for each number; None is null."""
    given = [array for array in arrays if array is not None]
    numbers = np.concatenate(given) if given else np.empty(0)
    missing = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(arrays), pa.array(numbers, kind), mask=missing)


def _offsets(lists: list[Any]) -> Any:
    lengths = [0 if one is None else len(one) for one in lists]
    return pa.array(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), pa.int32())
