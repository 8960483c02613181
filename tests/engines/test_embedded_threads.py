"""The number of threads follows the cores that are free. No clock: steps are told, not taken."""

from __future__ import annotations

import pytest

from outrider.engines.embedded.threads import REST_S, WINDOW_S, Threads


def run(threads: Threads, start: float, steps: int, share: float) -> tuple[float, list[int]]:
    """`steps` windows in which the main thread runs for `share` of the time; returns the time and the numbers used."""
    used = []
    for _ in range(steps):
        used.append(threads.count)
        start += WINDOW_S
        threads.judge(start, WINDOW_S, share * WINDOW_S)
    return start, used


def test_free_cores_are_all_used():
    assert set(run(Threads(most=8), 0.0, 50, 0.95)[1]) == {8}


def test_waiting_threads_are_halved_down_to_one_and_come_back():
    threads = Threads(most=8)
    now, used = run(threads, 0.0, 4, 0.4)
    assert used == [8, 4, 2, 1]
    _, used = run(threads, now, 200, 0.9)
    assert used[-1] == 8


@pytest.mark.parametrize("minutes", [1, 10])
def test_while_cores_are_taken_more_threads_are_tried_ever_more_rarely(minutes):
    threads = Threads(most=2)
    _, used = run(threads, 0.0, int(60 * minutes / WINDOW_S), 0.5)
    tries = sum(count == 2 for count in used)
    assert tries <= 5 + 60 * minutes / REST_S[1]


def test_short_steps_are_judged_together():
    threads = Threads(most=2)
    for i in range(10):
        threads.judge(float(i), WINDOW_S / 20, 0.0)
    assert threads.count == 2


def test_a_number_that_was_asked_for_is_kept():
    assert set(run(Threads(most=4, least=4), 0.0, 20, 0.2)[1]) == {4}


def test_one_thread_stays_one():
    assert set(run(Threads(most=1), 0.0, 20, 0.2)[1]) == {1}
