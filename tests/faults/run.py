"""One run of one scenario: its stack, its catalogue with twins, its clients, and what is noted of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import AsyncClient
from outrider.generation import GenerationResult
from tests.faults.pages import touch_pages
from tests.faults.plan import Fault, inflict
from tests.faults.processes import Say
from tests.faults.report import Result
from tests.faults.requests import Request, draw_catalogue
from tests.faults.stack import Stack, undisturbed
from tests.faults.traffic import PLAIN, Manner, Tally, Traffic
from tests.faults.watch import History

_CATALOGUE = 40
_LONGEST = 300
_SHORT_STREAMS = 5
_KEPT_GAPS = 10


def _say_nothing(text: str) -> None:
    del text


@dataclass(slots=True)
class Run:
    """Context of a scenario."""

    stack: Stack
    rng: random.Random
    count: int
    """Faults, messages, streams or seconds: what the scenario counts."""
    catalogue: Sequence[Request]
    twins: Mapping[int, GenerationResult]
    clients: Sequence[AsyncClient]
    result: Result
    say: Say
    faults: list[tuple[Fault, float, float]] = field(default_factory=list)
    """Faults that were done, with the clock before each and when the stack had recovered."""

    @property
    def is_short(self) -> bool:
        """True if this is the short form, on a machine that has other things to do."""
        return self.result.scale == 0

    def traffic(
        self, num_streams: int, *, manners: Sequence[Manner] = (PLAIN,), options: Mapping[str, Any] | None = None
    ) -> Traffic:
        """Streams of the catalogue, so many at a time; a few in the short form."""
        return Traffic(
            self.clients,
            self.catalogue,
            self.twins,
            num_streams=min(num_streams, _SHORT_STREAMS) if self.is_short else num_streams,
            rng=self.rng,
            manners=manners,
            options=options,
        )

    async def touch_pages(self) -> None:
        """Fill every KV page once, so that memory which is used for the first time is not taken for a leak.

        Not in the short form, which measures no memory.
        """
        if self.is_short:
            return
        targets = self.stack.targets
        for process in targets:
            num_touched = await touch_pages(self.clients[0], process, num_sharing=len(targets))
            self.say(f"{num_touched} of {process.name}'s pages touched")

    async def suffer(self, plan: Sequence[Fault], traffic: Traffic) -> None:
        """One fault after another while streams run; the stack recovers in between where a fault says so.

        In the short form, users that a fault has met rest after each stream until the next: most of the time is that of
        processes that start, and the same machine computes the streams.
        """
        for fault in plan:
            traffic.rests = False
            await asyncio.sleep(fault.pause_s)
            self.say(f"{fault} ({traffic.tally.num_streams} streams, {len(traffic.tally.problems())} wrong)")
            began = time.monotonic()
            traffic.rests = self.is_short and not fault.hold_s  # one that lasts meets streams that begin, too
            await inflict(self.stack, fault)
            traffic.rests = self.is_short
            if fault.waits:
                await self.stack.whole()
                traffic.rests = False
                await traffic.progress()
            self.faults.append((fault, began, time.monotonic()))
        await self.stack.whole()

    def note_streams(self, tally: Tally, *, longest_gap_s: float | None = None) -> None:
        """Figures of streams; ``longest_gap_s`` bounds the longest wait of any that has begun for its next output."""
        self.result.problems += tally.problems()
        self.result.add("streams", tally.num_streams)
        self.result.add("streams different", len(tally.different), 0)
        self.result.add("streams failed", len(tally.failed), 0)
        self.result.add("streams hung", len(tally.hung), 0)
        gaps = sorted(tally.longest_gaps, reverse=True)
        quiet = [gap for gap, clock, _ in gaps if not self._faults_during(clock - gap, clock)]
        self.result.add("longest gap", gaps[0][0] if gaps else 0.0, longest_gap_s, "s")
        self.result.add("longest gap outside faults", max(quiet, default=0.0), None, "s")
        self.result.add("longest wait for a first output", tally.longest_first_s, None, "s")
        self.result.samples["longest_gaps"] = [
            {
                "seconds": round(gap, 3),
                "ended": round(clock, 3),
                "request": number,
                "during": self._faults_during(clock - gap, clock),
            }
            for gap, clock, number in gaps[:_KEPT_GAPS]
        ]

    def _faults_during(self, began: float, ended: float) -> list[str]:
        return [str(fault) for fault, start, end in self.faults if start < ended and began < end]

    async def note_left_over(self) -> None:
        """Figures of sessions and pages that are still held when no stream runs, and of crashes."""
        held = await self.stack.idle()
        self.result.problems += [*held, *self.stack.crashes]
        self.result.add("sessions and pages left", len(held), 0)
        self.result.add("crashes", len(self.stack.crashes), 0)

    def note_memory(self, histories: Mapping[str, History], *, most_mib: float | None = None) -> None:
        """Figures of memory at the end and at the peak, of the process that grew most; restarted ones aside."""
        growth = max((history.growth_mib for history in histories.values()), default=0.0)
        peak = max((history.peak_growth_mib for history in histories.values()), default=0.0)
        self.result.add("memory growth, end", growth, most_mib, "MiB")
        self.result.add("memory growth, peak", peak, most_mib, "MiB")
        for name, history in histories.items():
            self.result.add(f"memory growth of {name}, end", history.growth_mib, None, "MiB")
            self.result.add(f"memory growth of {name}, peak", history.peak_growth_mib, None, "MiB")
        self.result.samples["memory"] = {name: history.summary() for name, history in histories.items()}


@dataclass(frozen=True, slots=True)
class Prepared:
    """State that runs on one stack share: clients of its coordinators, a catalogue of requests, and their twins."""

    clients: Sequence[AsyncClient]
    catalogue: Sequence[Request]
    twins: Mapping[int, GenerationResult]

    def run(
        self, stack: Stack, name: str, *, seed: int, count: int, scale: float = 1.0, say: Say = _say_nothing
    ) -> Run:
        """A run of one scenario, with random numbers of its own."""
        rng = random.Random(f"{seed} {name}")
        return Run(stack, rng, count, self.catalogue, self.twins, self.clients, Result(name, seed, scale), say)


def _orders(stack: Stack) -> list[list[str]]:
    """The coordinators' addresses, each of them first once."""
    addresses = [coordinator.address for coordinator in stack.coordinators]
    return [addresses[first:] + addresses[:first] for first in range(len(addresses))]


@contextlib.asynccontextmanager
async def prepared(
    stack: Stack,
    *,
    seed: int,
    num_requests: int = _CATALOGUE,
    longest: int = _LONGEST,
    say: Say = _say_nothing,
    twins: Mapping[int, GenerationResult] | None = None,
) -> AsyncIterator[Prepared]:
    """Draw a catalogue and make its twins, before anything is disturbed; ``twins`` are those of an earlier stack."""
    catalogue = draw_catalogue(random.Random(f"{seed} requests"), num_requests, longest=longest)
    async with contextlib.AsyncExitStack() as cleanup:
        clients = [await cleanup.enter_async_context(AsyncClient(addresses)) for addresses in _orders(stack)]
        began = time.monotonic()
        twins = twins or await undisturbed(clients[0], catalogue)
        say(f"{len(catalogue)} requests, {len(twins)} with twins, made in {time.monotonic() - began:.0f} s")
        yield Prepared(clients, catalogue, twins)
