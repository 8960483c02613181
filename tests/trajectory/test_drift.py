"""What broke continuity, and what that cost."""

from __future__ import annotations

import io
import json

from rich.console import Console

from fakes.calls import call
from outrider.reports.drift import print_drift
from outrider.trajectory import build
from outrider.trajectory.drift import Drift, continuity
from outrider.types import CallState


def request(answers: int, system: str = "s", tools: tuple[str, ...] = ()) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "u"}]
    messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}] * answers
    return json.dumps({"messages": messages, "tools": list(tools)}).encode()


def seen(*calls):
    return [(one.turn, one.cause, one.recomputed) for one in continuity(calls, build(calls))]


START = [1, 9, 10, 11]
FIRST = call(START, [20, 2], seq=1, request=request(0))


def test_a_talk_that_goes_on_breaks_nothing():
    second = call([*START, 20, 2, 12], [21, 2], seq=2, request=request(1))
    assert seen(FIRST, second) == [(1, "", 0), (2, "", 0)]


def test_a_new_talk_is_no_break_and_nor_is_one_the_gateway_opened():
    assert seen(FIRST, call([1, 8], [30], seq=2, request=request(0)))[1] == (1, "", 0)
    assert seen(FIRST, call([1, 8], [30], seq=2, request=request(3), continuation="opened"))[1] == (4, "", 0)


def test_the_gateways_own_note_is_the_cause():
    broken = call([*START, 29, 2, 12], [21], seq=2, request=request(1), continuation="broke: tools changed")
    assert seen(FIRST, broken)[1] == (2, "tools changed", 2)  # [20, 2] was computed and is not shared


def test_where_the_engine_rendered_the_requests_tell():
    def after(prompt, **changes):
        return seen(FIRST, call(prompt, [21], seq=2, request=request(1, **changes)))[1]

    assert after([*START, 29, 2, 12]) == (2, "unknown", 2)
    assert after([1, 7, 10, 11, 20, 2, 12], system="other") == (
        2,
        "system prompt changed",
        5,
    )  # all but the first token
    assert after([1, 7, 10, 11, 20, 2, 12], tools=("t",)) == (2, "tools changed", 5)


def test_a_break_in_the_middle_of_a_talk_counts_though_its_beginning_is_kept():
    """The template drops the reasoning [60, 61] of the second answer: the third call extends the first one alone."""
    second = call([*START, 20, 2, 12], [60, 61, 21, 2], seq=2, request=request(1))
    third = call([*START, 20, 2, 12, 21, 2, 13], [22], seq=3, request=request(2))
    assert seen(FIRST, second, third) == [(1, "", 0), (2, "", 0), (3, "unknown", 3)]
    edited = call([*START, 20, 2, 15], [22], seq=3, request=request(1))  # goes back, and says something else
    assert seen(FIRST, second, edited)[2] == (2, "", 0)
    proven = call([*START, 20, 2, 12, 14], [22], seq=3, request=request(2), continuation="continued")
    assert seen(FIRST, second, proven)[2] == (3, "", 0)
    drift = Drift()
    drift.add([FIRST, second, third])
    report = drift.report()
    assert (report["breaks"], report["rows"], report["rows_without_breaks"]) == (1, 2, 1)


def test_the_closest_earlier_branch_is_the_one_compared_with():
    sub = call([1, 8, 50], [51, 2], seq=2, request=request(0))
    broken = call([*START, 20, 2, 12, 60, 13], [21], seq=4, request=request(2), continuation="broke: history rewritten")
    second = call([*START, 20, 2, 12], [61, 2], seq=3, request=request(1))
    assert seen(FIRST, sub, second, broken)[3] == (3, "history rewritten", 2)  # [61, 2] is not shared


def test_a_report_sums_up_by_harness_and_turn():
    drift = Drift()
    for rollout in range(2):
        drift.add(
            [
                call(START, [20, 2], seq=1, request=request(0), attempt_id=f"r{rollout}"),
                call([*START, 29, 2, 12], [21], seq=2, request=request(1), attempt_id=f"r{rollout}"),
                call([1, 8], [30], seq=3, dialect="anthropic_messages", attempt_id=f"r{rollout}"),
                call([1, 8], [30], seq=4, state=CallState.FAILED, attempt_id=f"r{rollout}"),
            ]
        )
    report = drift.report()
    assert json.loads(json.dumps(report)) == report
    assert (report["rollouts"], report["calls"], report["exact_calls"], report["breaks"]) == (2, 8, 6, 2)
    assert (report["rows"], report["rows_without_breaks"]) == (6, 4)
    assert (report["prompt_tokens"], report["recomputed_tokens"]) == (26, 4)
    first, second = report["harnesses"]
    assert (first["harness"], first["breaks"]) == ("anthropic_messages · policy", 0)
    assert [(turn["turn"], turn["calls"], turn["breaks"]) for turn in second["turns"]] == [(1, 2, 0), (2, 2, 2)]
    assert second["turns"][1]["causes"] == {"unknown": {"calls": 2, "recomputed_tokens": 4}}

    console = Console(file=io.StringIO(), width=150, color_system=None)
    print_drift(report, console)
    text = console.file.getvalue()
    assert "unknown: 2 calls, 4 tokens" in text
    assert "2 breaks: 6 rows, 4 without them; 4 prompt tokens computed anew" in text


def test_nothing_to_look_at_is_said():
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_drift(Drift().report(), console)
    assert "no calls" in console.file.getvalue()
