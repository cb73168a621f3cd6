"""All scenarios by name: layout, count at scale 1, and what is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.run import Run
from tests.faults.scenarios import crowds, fuzz, links, processes, serve
from tests.faults.served import Output, run_served
from tests.faults.stack import Layout, Stack, run_stack


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table."""

    name: str
    count: int
    """Number at scale 1 of faults, messages, streams or seconds."""
    counted: str
    """Unit of the count."""
    layout: Layout | Output
    """A stack of this layout, or `outrider serve` with this output."""
    play: Callable[[Run], Coroutine[Any, Any, None]]

    def stack(self, folder: Path | None) -> AbstractAsyncContextManager[Stack]:
        """The stack that it is played on; logs go to the folder."""
        return run_served(self.layout) if isinstance(self.layout, Output) else run_stack(self.layout, folder)


_ONE = Layout()
_TWO_COORDINATORS = Layout(num_coordinators=2)
_TWO_TARGETS = Layout(num_targets=2)
_FEW_PAGES = Layout(target={"num_pages": 200}, draft={"num_pages": 120})
_TWO_SHARED_TARGETS = Layout(num_targets=2, target={"device": "cpu", "tensor_parallel_size": 2})
_REPLICAS = Layout(num_targets=2, num_drafts=2, is_proxied=True)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("kill-drafts", 100, "kills", _ONE, processes.kill_drafts),
        Scenario("kill-targets", 50, "kills", _ONE, processes.kill_targets),
        Scenario("kill-coordinators", 20, "kills", _TWO_COORDINATORS, processes.kill_coordinators),
        Scenario("stop-drafts", 5, "stops of 10 s", _ONE, processes.stop_drafts),
        Scenario("stop-targets", 5, "stops of 10 s", _TWO_TARGETS, processes.stop_targets),
        Scenario("hang-drafts", 5, "hangs", _ONE, processes.hang_drafts),
        Scenario("hang-targets", 5, "hangs", _TWO_TARGETS, processes.hang_targets),
        Scenario("hang-ranks", 2, "hangs", _TWO_SHARED_TARGETS, processes.hang_ranks),
        Scenario("hang-coordinators", 3, "hangs", _TWO_COORDINATORS, processes.hang_coordinators),
        Scenario("link-faults", 500, "faults", _REPLICAS, links.link_faults),
        Scenario("fuzz", 100_000, "messages", _ONE, fuzz.fuzz),
        Scenario("crowd", 1000, "streams at once", _ONE, crowds.crowd),
        Scenario("few-pages", 200, "streams at once", _FEW_PAGES, crowds.crowd),
        Scenario("deaf-readers", 200, "readers that never read", _ONE, crowds.deaf_readers),
        *(
            Scenario(f"serve-{output.replace(' ', '-')}", 4500, "requests of one token", output, serve.serve)
            for output in (Output.CLOSED_PIPE, Output.STALLED_PIPE, Output.FULL_DISK)
        ),
        Scenario("churn", 1800, "seconds", _ONE, crowds.churn),
    )
}
