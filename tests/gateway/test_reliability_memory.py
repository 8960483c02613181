"""Large bodies: what they cost in memory, and that it is given back."""

from __future__ import annotations

import sys

from fakes.gateway import wait_for
from fakes.records import make_call
from outrider.stores.sqlite import SqliteStore


def test_a_writer_with_nothing_to_do_holds_no_body(tmp_path):
    store = SqliteStore(tmp_path / "s.sqlite3")
    call = make_call("a", request=b"x" * 1000)
    before = sys.getrefcount(call)
    store.append_call(call).result(30)
    wait_for(lambda: sys.getrefcount(call) == before)
    store.close()
