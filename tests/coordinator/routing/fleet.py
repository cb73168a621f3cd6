"""A coordinator over several toy targets and drafts, found by a source that a test changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.config import CoordinatorSettings
from outrider.errors import UnavailableError
from outrider.generation import Delta, GenerationRequest, GenerationResult
from outrider.types import SamplingParams
from outrider_coordinator.service import Coordinator
from tests.support.coordinator_stats import stats_of
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows

VOCAB_SIZE = 8
ROWS = random_rows(VOCAB_SIZE, seed=1)
SOON_S = 240.0


class Found:
    """``outrider_coordinator.routing.replicas.Source``: what is listed now. Looked at as often as can be."""

    def __init__(self, *ports: Any) -> None:
        self.interval_s: float | None = 0.001
        self.listed: dict[str, Any] = {f"{number}:1": port for number, port in enumerate(ports)}
        self.is_down = False
        self.num_looks = 0

    async def find(self) -> dict[str, Any]:
        self.num_looks += 1
        if self.is_down:
            raise UnavailableError("no resolver answers")
        return dict(self.listed)

    async def seen(self) -> None:
        """Return when the latest change was looked at."""
        looks = self.num_looks + 2
        await eventually(lambda: self.num_looks >= looks)


def target(**shape: Any) -> ToyTarget:
    return ToyTarget(ROWS, VOCAB_SIZE, **shape)


def draft(**shape: Any) -> ToyDraft:
    return ToyDraft(ROWS, VOCAB_SIZE, **shape)


def ask(**fields: Any) -> GenerationRequest:
    temperature = fields.pop("temperature", 0.0)
    defaults: dict[str, Any] = {"prompt_token_ids": (1, 2, 3), "max_tokens": 24}
    return GenerationRequest(sampling=SamplingParams(temperature=temperature), **(defaults | fields))


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():
            await asyncio.sleep(0.001)


class Stream:
    """One request being read."""

    def __init__(self, coordinator: Coordinator, request: GenerationRequest) -> None:
        self.token_ids: list[int] = []
        self._deltas = coordinator.generate_stream(request)
        self._result: GenerationResult | None = None

    async def read(self, num_tokens: int) -> None:
        async with asyncio.timeout(SOON_S):
            while len(self.token_ids) < num_tokens:
                self._take(await anext(self._deltas))

    async def finish(self) -> GenerationResult:
        async with asyncio.timeout(SOON_S):
            async for delta in self._deltas:
                self._take(delta)
        assert self._result is not None
        assert self._result.token_ids == tuple(self.token_ids)
        return self._result

    def _take(self, delta: Delta) -> None:
        """Deltas for a late reader: all there is, the result included."""
        assert self._result is None
        self.token_ids += delta.token_ids
        self._result = delta.result


class Fleet:
    """The coordinator, and where it finds its replicas."""

    def __init__(self, targets: Found, drafts: Found | None, settings: CoordinatorSettings) -> None:
        self.targets, self.drafts = targets, drafts
        self.ups: list[bool] = []
        self.coordinator = Coordinator(targets, drafts, settings, on_target=self.ups.append)
        self.toys: set[Any] = {*targets.listed.values(), *(drafts.listed.values() if drafts else ())}

    async def run(self, request: GenerationRequest) -> GenerationResult:
        return await Stream(self.coordinator, request).finish()

    def stream(self, request: GenerationRequest) -> Stream:
        return Stream(self.coordinator, request)

    def is_free(self) -> bool:
        """True if no page is held anywhere."""
        return all(toy.num_pages_free == toy.description.num_pages for toy in self.toys)

    def is_attached(self, num_targets: int, num_drafts: int = 0) -> bool:
        stats = stats_of(self.coordinator)
        return (stats.num_targets, stats.num_drafts) == (num_targets, num_drafts)


def num_held(toy: Any) -> int:
    """Pages that sessions hold on a toy."""
    held: int = toy.description.num_pages - toy.num_pages_free
    return held


def kill(toy: Any) -> None:
    """Break its links and make it unreachable."""
    toy.faults.unreachable = True
    toy.break_links("killed")


@contextlib.asynccontextmanager
async def fleet(targets: Found, drafts: Found | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    """Started; in the end every page of every toy ever listed at the start is free."""
    fixed: dict[str, Any] = {"draft_timeout_ms": 60_000, "draft_length": "fixed", "num_speculative_tokens": 4}
    made = Fleet(targets, drafts, CoordinatorSettings(**(fixed | settings)))
    async with asyncio.timeout(SOON_S):
        await made.coordinator.start()
    try:
        yield made
    finally:
        await made.coordinator.close()
    assert made.is_free()


async def own_tokens(request: GenerationRequest) -> tuple[int, ...]:
    """Token ids of one target alone."""
    async with fleet(Found(target())) as alone:
        return (await alone.run(request)).token_ids
