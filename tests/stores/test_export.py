"""One row a call, nothing lost on the way, and nobody held up by a long export."""

from __future__ import annotations

import base64
import json
import math
import sys
import threading
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fakes.records import make_call, make_choice, make_rollout
from outrider.errors import ConfigError, SetupError, StoreError
from outrider.stores import export_parquet
from outrider.stores.export import PAGE, export_store
from outrider.types import Attempt, CallState, Fidelity, Retry, Reward, RolloutState


def exported(store, out, **options):
    counts = export_store(store, out, **options)
    assert counts.size == out.stat().st_size
    if out.suffix == ".parquet":
        rows = pq.read_table(out).to_pylist()
        return counts, [row | {"sampling": json.loads(row["sampling"])} for row in rows]
    return counts, [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(params=["out.parquet", "out.jsonl"])
def out(request, tmp_path):
    return tmp_path / request.param


def append(store, *calls):
    for future in [store.append_call(call) for call in calls]:
        future.result(30)


def test_a_row_holds_the_call_and_what_is_known_of_its_attempt(durable_store, out):
    rollout = make_rollout("r", split="train", step=3, state=RolloutState.SUCCEEDED, attempt=2, reward=0.5)
    durable_store.add_rollouts([rollout])
    for number in (1, 2):
        durable_store.put_attempt(Attempt(id=f"r.a{number}", rollout_id="r", number=number))
    for value, name in ((0.1, "final"), (0.5, "final"), (9.0, "style")):
        durable_store.add_reward(Reward(attempt_id="r.a2", value=value, name=name)).result(30)
    durable_store.add_reward(Reward(attempt_id="r.a2", value=0.9, call_id="whole")).result(30)  # not the attempt's
    choices = (
        make_choice(0, [1], [-0.5]),
        make_choice(1, [2**31 - 1, 4], [-0.25, -math.inf], "length", ((3, 1), (4, 1))),
    )
    append(
        durable_store,
        make_call("late", "r.a1"),
        make_call(
            "whole",
            "r.a2",
            choices=choices,
            request='{"é": 1}'.encode(),
            response=b"\xff\x00",
            sampling={"temperature": 0.5, "stop": ["a"]},
            version_start=3,
            version_end=4,
            started_at=1764500000.125,
            duration_s=1.5,
            first_token_s=0.25,
            continuation="continued",
            replica="http://a:8000",
            retries=(Retry(replica="http://b:8000", status=503, error="busy", duration_s=0.25, wait_s=0.5),),
        ),
        make_call(
            "production",
            "trajectory:x",
            state=CallState.FAILED,
            status=502,
            prompt_ids=None,
            choices=(),
            usage=None,
            fidelity=Fidelity.BROKEN,
            fidelity_reason="cut",
            error="boom",
        ),
    )
    counts, (late, whole, production) = exported(durable_store, out)
    assert (counts.calls, counts.last_seq, counts.base64_bodies) == (3, 3, 1)
    assert counts.fidelity == {"exact": 2, "broken": 1}
    infinite = -math.inf if out.suffix == ".parquet" else None
    assert whole == {
        "seq": 2,
        "id": "whole",
        "attempt_id": "r.a2",
        "rollout_id": "r",
        "task_id": "task of r",
        "group_id": "g",
        "split": "train",
        "step": 3,
        "attempt": 2,
        "counted": True,
        "reward": 0.5,
        "dialect": "openai_chat",
        "model": "policy",
        "state": "complete",
        "status": 200,
        "streamed": False,
        "fidelity": "exact",
        "fidelity_reason": "",
        "continuation": "continued",
        "replica": "http://a:8000",
        "retries": [{"replica": "http://b:8000", "status": 503, "error": "busy", "duration_s": 0.25, "wait_s": 0.5}],
        "error": "",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "version_start": 3,
        "version_end": 4,
        "started_at": 1764500000.125,
        "duration_s": 1.5,
        "first_token_s": 0.25,
        "sampling": {"temperature": 0.5, "stop": ["a"]},
        "prompt_ids": [1, 2, 3],
        "choices": [
            {"index": 0, "token_ids": [1], "logprobs": [-0.5], "finish_reason": "stop", "versions": []},
            {
                "index": 1,
                "token_ids": [2**31 - 1, 4],
                "logprobs": [-0.25, infinite],
                "finish_reason": "length",
                "versions": [{"version": 3, "tokens": 1}, {"version": 4, "tokens": 1}],
            },
        ],
        "request": '{"é": 1}',
        "request_base64": False,
        "response": base64.b64encode(b"\xff\x00").decode(),
        "response_base64": True,
    }
    assert (late["rollout_id"], late["attempt"], late["counted"], late["reward"]) == ("r", 1, False, None)
    assert (production["rollout_id"], production["counted"], production["step"]) == (None, None, None)
    assert (production["prompt_ids"], production["choices"], production["prompt_tokens"]) == (None, [], None)
    assert (production["fidelity_reason"], production["status"], production["error"]) == ("cut", 502, "boom")


def test_both_formats_have_the_same_fields_in_the_same_order(sqlite_store, tmp_path):
    append(sqlite_store, make_call("a"))
    _, (row,) = exported(sqlite_store, tmp_path / "x.jsonl")
    assert list(row) == export_parquet.SCHEMA.names


def test_an_empty_store_makes_an_empty_file(durable_store, out):
    counts, rows = exported(durable_store, out)
    assert (counts.calls, counts.last_seq, rows) == (0, 0, [])


@pytest.mark.parametrize("number", [PAGE - 1, PAGE, PAGE + 1])
def test_every_call_is_there_once_whatever_the_pages(durable_store, out, number, monkeypatch):
    monkeypatch.setattr(export_parquet, "ROW_GROUP_ROWS", 5)
    append(durable_store, *(make_call(f"c{one}", f"a{one % 3}") for one in range(number)))
    told = []
    counts, rows = exported(durable_store, out, progress=told.append)
    assert [row["id"] for row in rows] == [f"c{one}" for one in range(number)]
    assert [row["attempt_id"] for row in rows] == [f"a{one % 3}" for one in range(number)]
    assert told[-1] == counts.calls == number


def test_the_next_export_gets_what_came_since(durable_store, tmp_path):
    append(durable_store, make_call("a"), make_call("b"))
    counts, _ = exported(durable_store, tmp_path / "1.jsonl")
    append(durable_store, make_call("c"))
    counts, rows = exported(durable_store, tmp_path / "2.jsonl", after_seq=counts.last_seq)
    assert ([row["id"] for row in rows], counts.last_seq) == (["c"], 3)
    counts, rows = exported(durable_store, tmp_path / "3.jsonl", after_seq=counts.last_seq)
    assert (rows, counts.last_seq) == ([], 3)


def test_an_export_that_fails_leaves_the_old_file(sqlite_store, out):
    append(sqlite_store, make_call("a"))
    export_store(sqlite_store, out)
    before = out.read_bytes()
    append(sqlite_store, *(make_call(f"c{number}") for number in range(2 * PAGE)))

    def stop(calls):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_store(sqlite_store, out, progress=stop)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir() if "partial" in path.name] == []
    export_store(sqlite_store, out)
    assert out.read_bytes() != before


def test_what_cannot_be_written_is_told(sqlite_store, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"export: 'csv' is no format; end OUT in \.parquet or \.jsonl"):
        export_store(sqlite_store, tmp_path / "x.csv")
    export_store(sqlite_store, tmp_path / "x.csv", format="jsonl")
    with pytest.raises(ConfigError, match="in one that does not exist"):
        export_store(sqlite_store, tmp_path / "nowhere" / "x.jsonl")
    with pytest.raises(ConfigError, match="is a folder"):
        export_store(sqlite_store, tmp_path, format="jsonl")
    append(sqlite_store, *(make_call(f"c{number}", response=b"x" * 10_000) for number in range(5)))
    (tmp_path / "full.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"full\.jsonl: cannot be written: .*No space left"):
        export_store(sqlite_store, tmp_path / "full.jsonl")
    monkeypatch.delitem(sys.modules, "outrider.stores.export_parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SetupError, match=r"pip install 'outrider\[export\]'"):
        export_store(sqlite_store, tmp_path / "x.parquet")


def test_memory_is_bounded_by_a_page_and_a_row_group(sqlite_store, out, monkeypatch):
    monkeypatch.setattr(export_parquet, "ROW_GROUP_BYTES", 2 << 20)
    body = msgspec.json.encode({"content": "x" * 100_000})
    append(sqlite_store, *(make_call(f"c{number}", request=body, response=body) for number in range(8 * PAGE)))
    pool = pa.system_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        export_store(sqlite_store, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    whole = 8 * PAGE * 2 * len(body)  # about 51 MB
    assert peak < whole / 2
    if out.suffix == ".parquet":
        assert 0 < pool.max_memory() < whole / 2


def test_numbers_are_exact_in_both_formats(sqlite_store, tmp_path):
    rng = np.random.default_rng(0)
    logprobs = -rng.exponential(1, 1000).astype(np.float32)
    ids = rng.integers(0, 2**31, 1000).astype(np.int32)
    append(sqlite_store, make_call("a", choices=(make_choice(0, ids.tolist(), logprobs.tolist()),)))
    for name in ("x.jsonl", "x.parquet"):
        _, (row,) = exported(sqlite_store, tmp_path / name)
        np.testing.assert_array_equal(np.array(row["choices"][0]["logprobs"], np.float32), logprobs)
        np.testing.assert_array_equal(np.array(row["choices"][0]["token_ids"], np.int32), ids)


def test_a_long_export_delays_no_writer_and_lets_the_wal_be_recycled(sqlite_store, out):
    """The reader stands still in the middle, as one on a slow disk would, while more is written than a WAL may hold."""
    append(sqlite_store, *(make_call(f"c{number}") for number in range(3 * PAGE)))
    reached, go_on = threading.Event(), threading.Event()

    def wait(calls):
        reached.set()
        assert go_on.wait(60)

    exporter = threading.Thread(target=export_store, args=(sqlite_store, out), kwargs={"progress": wait})
    exporter.start()
    assert reached.wait(60)
    noise = np.random.default_rng(0).bytes(200_000)  # does not compress
    wal = sqlite_store.path.with_name(sqlite_store.path.name + "-wal")
    largest = 0
    for number in range(150):  # 30 MB, each committed while the reader stands still
        assert sqlite_store.append_call(make_call(f"n{number}", response=noise)).result(60) == 3 * PAGE + number + 1
        largest = max(largest, wal.stat().st_size)
    go_on.set()
    exporter.join(60)
    assert largest < 12 << 20
    assert out.exists()


def test_a_long_export_of_postgres_holds_no_snapshot(postgres_server, postgres_store, out):
    append(postgres_store, *(make_call(f"c{number}") for number in range(2 * PAGE)))
    held = []

    def look(calls):
        with postgres_server.admin() as admin:
            held.extend(
                admin.execute(
                    "SELECT state FROM pg_stat_activity WHERE application_name = 'outrider'"
                    " AND (backend_xmin IS NOT NULL OR state LIKE 'idle in%')"
                ).fetchall()
            )
        postgres_store.append_call(make_call(f"n{calls}")).result(30)

    assert export_store(postgres_store, out, progress=look).calls >= 2 * PAGE
    assert held == []


def test_every_field_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    missing = [name for name in export_parquet.SCHEMA.names if f"`{name}`" not in page]
    assert missing == []
