"""The inbox of an engine's thread: everything arrives in order, and no wait outlasts its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from outrider.serving.in_process.inbox import Inbox

DEADLINE_S = 240.0


def ends(work: Callable[[], object]) -> bool:
    """True if the work ends, in a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return not thread.is_alive()


def test_waits_that_are_over_at_once_end() -> None:
    inbox: Inbox[int] = Inbox()

    def work() -> None:
        for number in range(60_000):  # ``queue.SimpleQueue`` came to some 50,000
            inbox.put(number)
            assert inbox.take_all() == [number]
            inbox.wait(1e-6)

    assert ends(work)


def test_a_wait_lasts_until_its_time_is_over() -> None:
    inbox: Inbox[int] = Inbox()
    began = time.monotonic()
    inbox.wait(0.05)
    assert time.monotonic() - began >= 0.05
    inbox.wait(0.0)
    inbox.wait(-1.0)


def test_what_is_there_is_not_waited_for() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    assert ends(lambda: inbox.wait(None))
    assert inbox.take_all() == [1] and inbox.take_all() == []


def test_entries_of_many_threads_all_arrive_in_the_order_of_each() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()
    writers, each = 6, 3000

    def write(writer: int) -> None:
        for number in range(each):
            inbox.put((writer, number))
            if number % 50 == writer:
                time.sleep(1e-5)  # so that the reader waits, too

    found: list[tuple[int, int]] = []

    def read() -> None:
        while len(found) < writers * each:
            inbox.wait(None if len(found) % 3 else 1e-5)
            found.extend(inbox.take_all())

    threads = [threading.Thread(target=write, args=(writer,), daemon=True) for writer in range(writers)]
    for thread in threads:
        thread.start()
    assert ends(read)
    for writer in range(writers):
        assert [number for owner, number in found if owner == writer] == list(range(each))
