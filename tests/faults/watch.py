"""Memory, files and threads of every process of a stack over time."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tests.faults.processes import Process
from tests.faults.readings import Usage

_EVERY_S = 0.25
_KEPT_IN_REPORTS = 60


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    """Seconds since the watch began."""
    pid: int
    usage: Usage


@dataclass(slots=True)
class History:
    """Samples of one process, in order; a restart begins a new ``pid``."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """Memory at the end less memory at the start; 0 for a process that was started again."""
        return self._grown_to(self.samples[-1:])

    @property
    def peak_growth_mib(self) -> float:
        """The most memory less memory at the start; 0 for a process that was started again."""
        return self._grown_to(self.samples)

    @property
    def last_over_middle(self) -> float:
        """Mean memory in the last third of the time over that in the middle third; 0 with too few samples."""
        first, last = (self.samples[0].at_s, self.samples[-1].at_s) if self.samples else (0.0, 0.0)
        third = (last - first) / 3
        middle = [one.usage.rss_mib for one in self.samples if first + third <= one.at_s < first + 2 * third]
        end = [one.usage.rss_mib for one in self.samples if one.at_s >= first + 2 * third]
        return statistics.fmean(end) / statistics.fmean(middle) if middle and end else 0.0

    def summary(self) -> dict[str, object]:
        """Summary for the result file: some samples, and files and threads at both ends."""
        every = max(1, len(self.samples) // _KEPT_IN_REPORTS)
        ends = [one.usage for one in (self.samples[:1] + self.samples[-1:])]
        return {
            "rss_mib": [round(one.usage.rss_mib, 1) for one in self.samples[::every]],
            "every_s": round(every * _EVERY_S, 1),
            "peak_at_s": round(max(self.samples, key=_memory_of).at_s, 1) if self.samples else None,
            "num_files": [usage.num_files for usage in ends],
            "num_threads": [usage.num_threads for usage in ends],
        }

    def _grown_to(self, samples: list[Sample]) -> float:
        if not samples or len({one.pid for one in self.samples}) > 1:
            return 0.0
        return max(one.usage.rss_mib for one in samples) - self.samples[0].usage.rss_mib


def _memory_of(sample: Sample) -> float:
    return sample.usage.rss_mib


@contextlib.asynccontextmanager
async def watched(processes: Sequence[Process]) -> AsyncIterator[dict[str, History]]:
    """Histories by name, which grow inside."""
    histories = {process.name: History(process.name) for process in processes}
    began = time.monotonic()

    def look() -> None:
        for process in processes:
            usage, pid = process.usage(), process.pid
            if usage is not None and pid is not None:
                histories[process.name].samples.append(Sample(time.monotonic() - began, pid, usage))

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(_EVERY_S)

    task = asyncio.create_task(watch())
    try:
        yield histories
    finally:
        task.cancel()
        look()
