"""Whose failure it was."""

from dataclasses import replace

import pytest

from fakes.scripted_executor import OK, made
from outrider.outcome import classify
from outrider.types import UPSTREAM_STATUS, CallState, Failure


@pytest.mark.parametrize(
    ("calls", "failure"),
    [
        ([(CallState.FAILED, 502, b"a")], Failure.ENGINE),  # R09 f: the agent swallowed it and exits 0
        ([(CallState.FAILED, 502, b"a"), (CallState.COMPLETE, 200, b"a")], Failure.NONE),  # its client tried again
        ([(CallState.FAILED, 502, b"a"), (CallState.COMPLETE, 200, b"b")], Failure.ENGINE),
        ([(CallState.FAILED, 400, b"a")], Failure.NONE),  # R11: a context overflow is the harness's business
        ([(CallState.FAILED, 200, b"a")], Failure.ENGINE),  # S09: a stream that broke off
        ([(CallState.FAILED, 200, b"a"), (CallState.COMPLETE, 200, b"a")], Failure.NONE),
        ([(CallState.CANCELLED, 499, b"a")], Failure.NONE),
        ([], Failure.NO_CALLS),
    ],
)
def test_classify_by_calls(calls, failure):
    records = [made("r.a1", i, state, status, request) for i, (state, status, request) in enumerate(calls)]
    assert classify(OK, records, 0.0, ())[0] is failure


def test_an_overflow_that_is_told_in_a_stream_is_the_harnesss_business():
    told = replace(made("r.a1", 0, CallState.FAILED, 200, b"a"), error=f"{UPSTREAM_STATUS}400")
    assert classify(OK, [told], 0.0, ())[0] is Failure.NONE
