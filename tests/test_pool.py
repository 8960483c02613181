from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outrider.pool import DaemonPool


def test_results_and_errors_come_by_their_futures():
    pool = DaemonPool(2, "test")
    numbers = [pool.submit(lambda number=number: number * number) for number in range(20)]
    assert [future.result(30) for future in numbers] == [number * number for number in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(30)
    assert pool.submit(lambda: "still there").result(30) == "still there"
    pool.shutdown()


def test_no_more_at_once_than_there_are_threads():
    pool, gate, begun = DaemonPool(2, "test"), threading.Event(), threading.Semaphore(0)

    def work():
        begun.release()
        return gate.wait(30)

    futures = [pool.submit(work) for _ in range(5)]
    assert begun.acquire(timeout=30)
    assert begun.acquire(timeout=30)
    assert not begun.acquire(timeout=0.2)
    assert futures[4].cancel()
    gate.set()
    assert all(future.result(30) for future in futures[:4])
    pool.shutdown()


def test_its_threads_end_with_what_was_queued():
    pool = DaemonPool(3, "ending")
    futures = [pool.submit(lambda: threading.current_thread()) for _ in range(9)]
    pool.shutdown()
    for thread in {future.result(30) for future in futures}:
        thread.join(30)
        assert not thread.is_alive()


def test_what_has_not_begun_can_be_given_up():
    pool, gate, begun = DaemonPool(1, "test"), threading.Event(), threading.Event()
    first = pool.submit(lambda: begun.set() or gate.wait(30))
    others = [pool.submit(lambda: False) for _ in range(3)]
    assert begun.wait(30)
    pool.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in others)
    gate.set()
    assert first.result(30)


def test_a_process_does_not_wait_for_work_that_hangs():
    code = (
        "import threading; from outrider.pool import DaemonPool; begun = threading.Event()\n"
        "DaemonPool(1, 'hung').submit(lambda: begun.set() or threading.Event().wait())\n"
        "begun.wait(); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("end\n", "")
