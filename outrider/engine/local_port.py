"""A port of this process: a description, a core in its thread, and links to it.

What ``ports.Draft`` and ``ports.Target`` have in common when the service runs in process. Refuses to know which of the
two it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from outrider.engine.worker import Core, EngineWorker, LocalLink, OnFailure
from outrider.errors import UnavailableError
from outrider.ports import Refused, SessionFailed, SessionLost
from outrider.types import ModelDescription

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class LocalPort(Generic[CommandT, EventT]):
    """``on_failure`` is called from the engine's thread if its core ever raises; every link is broken by then.

    ``rehearsal`` is what a first request would send: ``warm_up`` sends it. ``at_end`` is called once nothing
    computes any more.
    """

    def __init__(
        self,
        core: Core[CommandT, EventT],
        description: ModelDescription,
        *,
        rehearsal: Sequence[CommandT] = (),
        on_failure: OnFailure | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._at_end = at_end
        self.description = description
        self._core = core
        self._rehearsal = tuple(rehearsal)
        self._worker = EngineWorker(core, name=f"{description.role}-engine", on_failure=on_failure)

    @property
    def is_alive(self) -> bool:
        """Whether links can be opened; False after a failure and after ``close``."""
        return self._worker.is_alive

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return self._core.num_sessions

    def refuse_sessions(self) -> None:
        """Refuse new sessions from now on, because the service is about to end."""
        self._core.refuse_sessions("the service is ending")

    async def describe(self) -> ModelDescription:
        """Facts of the service."""
        return self.description

    async def attach(self) -> LocalLink[CommandT, EventT]:
        """Open a link; ``UnavailableError`` when the service has stopped."""
        return self._worker.attach()

    async def warm_up(self) -> None:
        """Serve the rehearsal in the engine's own thread, as requests will be; ``UnavailableError`` if that fails."""
        if not self._rehearsal:
            return
        link = await self.attach()
        try:
            link.send(self._rehearsal)
            async for batch in link.events():
                if any(isinstance(event, SessionLost | SessionFailed | Refused) for event in batch.events):
                    raise UnavailableError(f"the warm-up was answered with {batch.events}")
                return
        finally:
            await link.close()

    async def close(self) -> None:
        """Stop after the step in progress; links break. Idempotent."""
        await asyncio.to_thread(self._worker.close)
        if self._at_end is not None:
            await asyncio.to_thread(self._at_end)
