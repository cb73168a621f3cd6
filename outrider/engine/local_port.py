"""A port of this process: a description, a core in its thread, and links to it.

What ``ports.Draft`` and ``ports.Target`` have in common when the service runs in process. Refuses to know which of the
two it is.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from outrider.engine.worker import Core, EngineWorker, LocalLink, OnFailure
from outrider.types import ModelDescription

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")


class LocalPort(Generic[CommandT, EventT]):
    """``on_failure`` is called from the engine's thread if its core ever raises; every link is broken by then."""

    def __init__(
        self,
        core: Core[CommandT, EventT],
        description: ModelDescription,
        *,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.description = description
        self._core = core
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

    async def close(self) -> None:
        """Stop after the step in progress; links break. Idempotent."""
        await asyncio.to_thread(self._worker.close)
