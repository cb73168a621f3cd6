"""A whole message of proposals or scores, checked or judged as one, before each session hears its own.

Owns which sessions' answers are taken together. Decides nothing: what is not settled here each session settles alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from outrider.ports import DraftEvent, Proposal, Scores, TargetEvent
from outrider.types import SparseEvidence, SparseScores
from outrider_coordinator.acceptance import Verdict
from outrider_coordinator.acceptance.vectorized import are_sound, judge_together
from outrider_coordinator.session.loop import SessionLoop

EventT = TypeVar("EventT", DraftEvent, TargetEvent)

Find = Callable[[int], SessionLoop | None]
"""The session of that number, if it runs."""


def sound_proposals(events: Sequence[DraftEvent], find: Find) -> frozenset[int]:
    """Sessions whose proposal need not be checked any more."""
    cases = {
        event.session: case
        for event in _only(events)
        if isinstance(event, Proposal) and isinstance(event.evidence, SparseEvidence)
        if (loop := find(event.session)) is not None and (case := loop.to_check(event, event.evidence)) is not None
    }
    return frozenset(cases) if are_sound(list(cases.values())) else frozenset()


def verdicts_of(events: Sequence[TargetEvent], find: Find) -> dict[int, Verdict]:
    """Verdicts by session, of those whose scores need not be judged any more."""
    cases = {
        event.session: case
        for event in _only(events)
        if isinstance(event, Scores) and isinstance(event.form, SparseScores)
        if (loop := find(event.session)) is not None and (case := loop.to_judge(event, event.form)) is not None
    }
    verdicts = judge_together(list(cases.values()))
    return {} if verdicts is None else dict(zip(cases, verdicts, strict=True))


def _only(events: Sequence[EventT]) -> Iterable[EventT]:
    """Those of sessions that are spoken of once: of two answers only one can be what was asked for."""
    counts = Counter(event.session for event in events)
    return (event for event in events if counts[event.session] == 1)
