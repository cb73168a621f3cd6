"""A stack of real processes: targets, drafts and coordinators on loopback, links through proxies where asked for."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import outrider.demo
from outrider import AsyncClient
from outrider.generation import GenerationResult
from tests.faults.oracle import is_near_tie
from tests.faults.processes import START_DEADLINE_S, Process, ServiceProcess
from tests.faults.proxy import Proxy
from tests.faults.requests import Request
from tests.faults.traffic import Tally, patiently

PAIR = Path(outrider.demo.__file__).parent / "pair"
IDLE_DEADLINE_S = 240.0
NUM_PAGES = 1024
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Processes of a stack, and the settings that are not the defaults."""

    num_targets: int = 1
    num_drafts: int = 1
    num_coordinators: int = 1
    is_proxied: bool = False
    """True if the links to targets and drafts pass through proxies."""
    target: Mapping[str, object] = field(default_factory=dict)
    draft: Mapping[str, object] = field(default_factory=dict)
    coordinator: Mapping[str, object] = field(default_factory=dict)
    coordinator_module: str = "outrider_coordinator"


class Stack:
    """Processes that make up a service for users, and what holds for all of them."""

    def __init__(
        self,
        targets: Sequence[Process],
        drafts: Sequence[Process],
        coordinators: Sequence[Process],
        proxies: Mapping[str, Proxy],
    ) -> None:
        self.targets, self.drafts, self.coordinators = targets, drafts, coordinators
        self.proxies = proxies
        """Proxies by the name of the process that they stand in front of."""

    @property
    def processes(self) -> list[Process]:
        """All processes."""
        return [*self.targets, *self.drafts, *self.coordinators]

    @property
    def crashes(self) -> list[str]:
        """Ends of processes that no fault asked for."""
        return [crash for process in self.processes for crash in process.crashes]

    def process(self, name: str) -> Process:
        """The process of that name."""
        return next(process for process in self.processes if process.name == name)

    async def whole(self) -> None:
        """Return when every process serves and every coordinator is attached to every target and draft."""
        await asyncio.gather(*(process.serving() for process in self.processes))
        deadline = time.monotonic() + START_DEADLINE_S
        while lacking := await self._lacking():
            assert time.monotonic() < deadline, f"not attached: {lacking}"
            await asyncio.sleep(0.05)

    async def idle(self, deadline_s: float = IDLE_DEADLINE_S) -> list[str]:
        """Wait until no request runs and no session or page is held; what is still held at the deadline."""
        deadline = time.monotonic() + deadline_s
        while held := await self._held():
            if time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.1)
        return []

    async def _lacking(self) -> list[str]:
        wanted = {"target": len(self.targets), "draft": len(self.drafts)}
        lacking = []
        for coordinator in self.coordinators:
            metrics = await coordinator.metrics() or {}
            attached = {side: metrics.get(f"outrider_replicas_attached/{side}", 0) for side in wanted}
            if any(attached[side] < wanted[side] for side in wanted):
                lacking.append(f"{coordinator.name} has {attached} of {wanted}")
        return lacking

    async def _held(self) -> list[str]:
        held = []
        for process in self.processes:
            metrics = await process.metrics()
            if metrics is None:
                held.append(f"{process.name} gives no metrics")
                continue
            held += [f"{process.name}: {name} {metrics[name]:g}" for name in _HELD if metrics.get(name)]
        return held


_HELD = (
    "outrider_num_requests_running",
    "outrider_num_requests_waiting",
    "outrider_num_requests_paused",
    "outrider_sessions_open",
    "outrider_kv_pages_used",
    "outrider_kv_cache_usage_perc",
)
"""Metrics that are zero when nothing runs."""


@contextlib.asynccontextmanager
async def run_stack(layout: Layout, folder: Path | None = None) -> AsyncIterator[Stack]:
    """A stack that is whole inside and gone outside. Logs go to ``folder``, or to a temporary one."""
    with contextlib.ExitStack() as cleanup:
        place = folder or Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="outrider-faults-")))
        targets = [_model("target", number, layout.target, place) for number in range(layout.num_targets)]
        drafts = [_model("draft", number, layout.draft, place) for number in range(layout.num_drafts)]
        models = [*targets, *drafts]
        proxies = {model.name: Proxy(model.address) for model in models if layout.is_proxied}
        addresses = {name: getattr(proxies.get(name), "address", model.address) for name, model in _named(models)}
        coordinators = [_coordinator(number, layout, addresses, place) for number in range(layout.num_coordinators)]
        stack = Stack(targets, drafts, coordinators, proxies)
        try:
            await asyncio.gather(*(proxy.start() for proxy in proxies.values()))
            await asyncio.gather(*(process.start() for process in (*models, *coordinators)))
            await stack.whole()
            yield stack
        finally:
            await asyncio.gather(*(process.stop() for process in (*models, *coordinators)))
            await asyncio.gather(*(proxy.close() for proxy in proxies.values()))


def _model(role: str, number: int, settings: Mapping[str, object], folder: Path) -> ServiceProcess:
    flags = {"model": PAIR / role, "num_pages": NUM_PAGES, "num_threads": 1, "log_interval_s": 0, **settings}
    return ServiceProcess(f"{role}-{number}", f"outrider_{role}", flags, folder=folder)


def _coordinator(number: int, layout: Layout, addresses: Mapping[str, str], folder: Path) -> ServiceProcess:
    flags: dict[str, object] = {"log_interval_s": 0, **layout.coordinator}
    for role in ("target", "draft"):
        if places := [address for name, address in addresses.items() if name.startswith(role)]:
            flags[f"{role}_address"] = ",".join(places)
    return ServiceProcess(f"coordinator-{number}", layout.coordinator_module, flags, folder=folder)


def _named(processes: Sequence[Process]) -> list[tuple[str, Process]]:
    return [(process.name, process) for process in processes]


async def undisturbed(client: AsyncClient, catalogue: Sequence[Request]) -> dict[int, GenerationResult]:
    """The twins of the determined requests: what the target gives alone, K = 0, while nothing is wrong.

    Requests that come near to a tie have none.
    """
    places = asyncio.Semaphore(_AT_ONCE)

    async def result(request: Request) -> tuple[Request, GenerationResult]:
        num_logprobs = max(2, request.options.get("logprobs", 0))
        async with places:
            reading = await patiently(client, request, Tally(), num_speculative_tokens=0, logprobs=num_logprobs)
        assert reading.result is not None, f"no twin: {reading.error} for {request}"
        return request, reading.result

    found = await asyncio.gather(*(result(request) for request in catalogue if request.is_determined))
    return {
        request.number: twin if "logprobs" in request.options else replace(twin, logprobs=None)
        for request, twin in found
        if not is_near_tie(request, twin)
    }
