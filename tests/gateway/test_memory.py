"""A call leaves nothing behind that only the garbage collector frees: its bodies would pile up until then."""

from __future__ import annotations

import gc

import pytest

from outrider.gateway.exchange import Exchange
from outrider.types import Call


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_is_in_no_circle_of_references(gateway, streamed):
    key = gateway.open()
    gateway.chat(key, stream=streamed)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(5):
            gateway.chat(key, stream=streamed)
        gc.collect()
        left = [type(thing).__name__ for thing in gc.garbage if isinstance(thing, Exchange | Call)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
