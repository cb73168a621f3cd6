"""A session that a service names twice in one message: one answer counts, and others are late."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.benchmarks.step import turn
from outrider.ports import EventBatch
from tests.coordinator.session.test_transitions import outputs
from tests.support.equality import one_by_one


def in_the_same_columns(batch: EventBatch[Any]) -> EventBatch[Any]:
    """Half of the sessions again at the end."""
    first = batch.batched[0]
    count = len(first.sessions)
    doubled = first.selected(np.array([*range(count), *range(count // 2, count)]))
    return replace(batch, batched=(doubled, *batch.batched[1:]))


def in_columns_of_their_own(batch: EventBatch[Any]) -> EventBatch[Any]:
    """All sessions again; where there is no evidence, with other tokens."""
    again = batch.batched[0]
    again = again if again.is_sparse else replace(again, token_ids=again.token_ids ^ 1)
    return replace(batch, batched=(*batch.batched, again))


def beside_batch(batch: EventBatch[Any]) -> EventBatch[Any]:
    """Half of the sessions as single events, which come first."""
    again = batch.batched[0]
    places = range(len(again.sessions) // 2, len(again.sessions))
    timings: Any = (*batch.timings, *again.timings(places))
    assert len(batch.timings) == len(batch.events)
    return replace(batch, events=(*batch.events, *again.events(places)), timings=timings)


def in_single_answers(batch: EventBatch[Any]) -> EventBatch[Any]:
    """All sessions as single events, half of them again at the end; where there is no evidence, with other tokens."""
    single = one_by_one(batch)
    again = batch.batched[0]
    again = again if again.is_sparse else replace(again, token_ids=again.token_ids ^ 1)
    places = range(len(again.sessions) // 2)
    timings: Any = (*single.timings, *again.timings(places))
    return replace(single, events=(*single.events, *again.events(places)), timings=timings)


_outputs_of_once: dict[tuple[int, float], list[Any]] = {}
"""Outputs of sessions that are named once, by draft length and temperature."""

WAYS = [in_the_same_columns, in_columns_of_their_own, beside_batch, in_single_answers]


def port_of(role: str, change: Callable[[EventBatch[Any]], EventBatch[Any]], changed: list[int]) -> Any:
    """Ports of which those of one role have their messages with columns changed; how many are, is told."""

    class Link(turn.WiredLink[Any, Any]):
        async def events(self) -> AsyncIterator[EventBatch[Any]]:
            async for batch in super().events():
                if not batch.batched or self._wire is not turn.WIRES[role]:
                    yield batch
                    continue
                changed.append(len(batch.batched[0].sessions))
                yield change(batch)

    class Port(turn.WiredPort[Any, Any]):
        async def attach(self) -> Any:
            link: Any = await super().attach()
            link.__class__ = Link
            return link

    return Port


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("role", "length"),
    [("draft", 4), ("target", 4), ("target", 0)],
)
async def test_a_session_that_is_named_twice_is_answered_once(
    role: str, length: int, temperature: float, change: Callable[[EventBatch[Any]], EventBatch[Any]]
) -> None:
    asked: dict[str, Any] = {"lengths": (length,), "temperatures": (temperature,)}
    changed: list[int] = []
    found = await outputs(port=port_of(role, change, changed), **asked)
    if (length, temperature) not in _outputs_of_once:
        _outputs_of_once[length, temperature] = await outputs(**asked)
    assert found == _outputs_of_once[length, temperature]
    assert len(changed) > 20
