"""Admission of sessions: a budget of pages for many that come together, and its cost."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serving.preemption import PageBudget
from outrider.serving.request import Request, RequestQueue
from outrider.serving.session import Session
from tests.support.core_driver import open_session

NUM_FREE = 400


class _Job:
    num_last = 1

    def __init__(self, num_pages: int) -> None:
        self.num_left = num_pages


class _Service:
    """A table, an executor and a queue of sessions that hold or need so many pages."""

    def __init__(self, num_free: int) -> None:
        self.num_pages_free, self.num_asked = num_free, 0
        self.held: dict[tuple[int, int], int] = {}
        self.opened: list[Session[Any]] = []
        self.queue = RequestQueue()
        ignored: Any = None
        self.budget = PageBudget(self, self, self.queue, ignored, ignored)  # type: ignore[arg-type]

    def num_pages_needed(self, job: _Job, num_tokens: int) -> int:
        self.num_asked += 1
        return num_tokens

    def num_pages(self, session: Session[Any]) -> int:
        return self.held.get(session.key, 0)

    def sessions(self) -> list[Session[Any]]:
        return self.opened

    def begin(self, number: int, arrival_ns: int, num_pages: int) -> bool:
        """True if a session is admitted; it waits then, and is gone otherwise."""
        command = open_session(number, prompt_length=1, max_length=9, num_token_ids=9, arrival_ns=arrival_ns)
        sequence: Any = SimpleNamespace()
        session, job = Session(0, command, sequence, 9, 1), _Job(num_pages)
        self.opened.append(session)
        is_admitted = self.budget.admits(session, job)
        assert is_admitted == (not num_pages or self._is_to_be_admitted(session, num_pages))
        if is_admitted:
            item: Any = None
            self.queue.put(Request(session, item, job, 0))
        else:
            self.opened.remove(session)
        return is_admitted

    def compute(self, session: Session[Any]) -> None:
        """Compute its job: it holds what it needed."""
        due = self.queue.due_of(session.key)
        if due is not None and due.job.num_left <= self.num_pages_free:
            self.queue.remove(due)
            self.held[session.key] = due.job.num_left
            self.num_pages_free -= due.job.num_left

    def end(self, session: Session[Any]) -> None:
        """Release the session."""
        self.queue.abort(session.key)
        self.num_pages_free += self.held.pop(session.key, 0)
        self.opened.remove(session)

    def _is_to_be_admitted(self, session: Session[Any], num_pages: int) -> bool:
        others = [other for other in self.opened if other is not session]
        of_younger = sum(self.num_pages(other) for other in others if other.age > session.age)
        promised = sum(each.job.num_left for each in self.queue.due if each.session.age < session.age)
        reserved = self.num_pages_free // 100 if any(other.age < session.age for other in others) else 0
        return bool(num_pages + promised + reserved <= self.num_pages_free + of_younger)


@pytest.mark.parametrize("seed", range(4))
def test_a_session_begins_where_older_ones_leave_pages_for_it(seed: int) -> None:
    choose = random.Random(seed)
    service, outcomes = _Service(NUM_FREE), set()
    for number in range(600):
        outcomes.add(service.begin(number, choose.randrange(300), choose.randrange(30)))
        for session in list(service.opened):
            if choose.random() < 0.05:
                service.compute(session)
            elif choose.random() < 0.05:
                service.end(session)
    assert outcomes == {True, False}


def test_each_of_many_prompts_that_come_together_is_looked_at_a_few_times() -> None:
    service = _Service(num_free=100_000)
    for number in range(512):
        assert service.begin(number, number, 8)
    assert service.num_asked <= 3 * 512
