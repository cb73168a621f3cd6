"""Replica connection: its end while its link is being closed after a break, and its errors where no replica answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import pytest

from outrider import __version__
from outrider.errors import DeadlineError, LoadingError, OutriderError, UnauthenticatedError, UnavailableError
from outrider.ports import DraftCommand, DraftEvent, EventBatch
from outrider.stalls import NO_STALL
from outrider.types import ModelDescription
from outrider_coordinator.routing import replica as attachment_module
from outrider_coordinator.routing.dispatch import DispatchScheduler
from outrider_coordinator.routing.replica import Replica, ReplicaEvents


class _SlowToClose:
    """A link that breaks when told to, and whose end takes as long as it is told to."""

    num_pages_free: int | None = None
    stall = NO_STALL

    def __init__(self) -> None:
        self.broken, self.may_close = asyncio.Event(), asyncio.Event()
        self.is_closing = self.is_closed = False

    def send(self, commands: Sequence[DraftCommand]) -> None:
        raise UnavailableError("nobody reads")

    async def events(self) -> AsyncIterator[EventBatch[DraftEvent]]:
        await self.broken.wait()
        raise UnavailableError("broken as told")
        yield EventBatch(())  # what makes it a generator

    async def close(self) -> None:
        self.is_closing = True
        await self.may_close.wait()
        self.is_closed = True


class _OneLink:
    """A port with one link."""

    def __init__(self) -> None:
        self.link = _SlowToClose()

    async def describe(self) -> ModelDescription:
        return ModelDescription("draft", "slow", "", 1, 1, 1, num_pages=5, version=__version__)

    async def attach(self) -> _SlowToClose:
        return self.link


async def _accept(description: ModelDescription) -> None:
    """Any will do."""


def _draft_at(
    port: _OneLink, attached: asyncio.Event | None = None, lost: asyncio.Event | None = None
) -> Replica[DraftCommand, DraftEvent]:
    """A draft; the events are set when it is attached and lost."""
    events: ReplicaEvents[DraftCommand, DraftEvent] = ReplicaEvents(
        _accept,
        attached=lambda _: attached.set() if attached else None,
        lost=lambda _: lost.set() if lost else None,
        on_batch=lambda _, batch: None,
        on_peer_event=lambda _, event: None,
    )
    return Replica("", port, "draft", events, DispatchScheduler())


async def test_a_link_being_lost_is_closed_before_the_attachment_is() -> None:
    port, lost = _OneLink(), asyncio.Event()
    connection = _draft_at(port, lost=lost)
    connection.start()
    async with asyncio.timeout(120):
        await connection.first_try()
        port.link.broken.set()
        await lost.wait()
        closing = asyncio.create_task(connection.close())
        while not port.link.is_closing:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done() and not port.link.is_closed
        port.link.may_close.set()
        await closing
    assert port.link.is_closed and not connection.is_up


@pytest.mark.parametrize(("reported", "believed"), [(None, 5), (3, 3), (5, 5), ((1 << 32) - 1, 5)])
async def test_no_more_pages_are_free_than_there_are(reported: int | None, believed: int) -> None:
    port, attached = _NotYet(), asyncio.Event()
    port.first = []
    connection = _draft_at(port, attached)
    assert connection.num_pages_free == 0
    connection.start()
    async with asyncio.timeout(120):
        await attached.wait()
        port.link.num_pages_free = reported
        assert connection.num_pages_free == believed
        port.link.may_close.set()
        await connection.close()


class _NotYet(_OneLink):
    """A port that cannot be reached, then loads, then is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[OutriderError] = [
            UnavailableError("nobody there"),
            LoadingError("still loading"),
            LoadingError("still loading"),
        ]

    async def describe(self) -> ModelDescription:
        if self.first:
            raise self.first.pop(0)
        return await super().describe()


async def test_a_service_that_cannot_be_reached_is_tried_again_without_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attachment_module, "RETRY_S", 0.001)
    port, attached = _NotYet(), asyncio.Event()
    port.first = [UnavailableError("nobody there"), DeadlineError("no answer"), LoadingError("loading")] * 100
    connection = _draft_at(port, attached)
    connection.start()
    async with asyncio.timeout(120):  # with pauses that double up to 2 s it takes ten minutes
        await attached.wait()
    port.link.may_close.set()
    await connection.close()


async def test_a_service_that_refuses_is_tried_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment_module, "RETRY_S", 0.001)
    monkeypatch.setattr(attachment_module, "LONGEST_RETRY_S", 0.004)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", noted)
    port, attached = _NotYet(), asyncio.Event()
    port.first = [UnauthenticatedError("a wrong token")] * 4
    connection = _draft_at(port, attached)
    connection.start()
    async with asyncio.timeout(120):
        await attached.wait()
    assert pauses == [0.002, 0.004, 0.004, 0.004]
    port.link.may_close.set()
    await connection.close()


async def test_only_what_is_not_as_it_should_be_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    port, attached = _NotYet(), asyncio.Event()
    connection = _draft_at(port, attached)
    with caplog.at_level(logging.INFO):
        connection.start()
        async with asyncio.timeout(120):
            await attached.wait()
    port.link.may_close.set()
    await connection.close()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the draft is not attached: nobody there"),
        ("INFO", "the draft is not attached: still loading"),
        ("INFO", "the draft is attached: slow"),
    ]
