"""An attachment that ends while it is still saying farewell to a link that broke."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from coordinator.attachment import Attachment
from outrider import __version__
from outrider.errors import UnavailableError
from outrider.ports import DraftCommand, DraftEvent, EventBatch
from outrider.types import ModelDescription


class _SlowToClose:
    """A link that breaks when told to, and whose end takes as long as it is told to."""

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
        return ModelDescription("draft", "slow", "", 1, 1, 1, version=__version__)

    async def attach(self) -> _SlowToClose:
        return self.link


async def _accept(description: ModelDescription) -> None:
    """Any will do."""


async def test_a_link_being_lost_is_closed_before_the_attachment_is() -> None:
    port, lost = _OneLink(), asyncio.Event()
    attachment: Attachment[DraftCommand, DraftEvent] = Attachment(
        port, "draft", accept=_accept, on_attached=lambda: None, on_batch=lambda batch: None, on_lost=lost.set
    )
    attachment.start()
    async with asyncio.timeout(30):
        await attachment.first_try()
        port.link.broken.set()
        await lost.wait()
        closing = asyncio.create_task(attachment.close())
        while not port.link.is_closing:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done() and not port.link.is_closed
        port.link.may_close.set()
        await closing
    assert port.link.is_closed and not attachment.is_up
