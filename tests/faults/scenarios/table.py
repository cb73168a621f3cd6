"""All scenarios by name: layout, count at scale 1, and what is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tests.faults.run import Run
from tests.faults.scenarios import crowds, fuzz, links, processes
from tests.faults.stack import Layout


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table."""

    name: str
    count: int
    """At scale 1: faults, messages, streams or seconds."""
    counted: str
    """What that counts."""
    layout: Layout
    play: Callable[[Run], Coroutine[Any, Any, None]]


_ONE = Layout()
_TWO_TARGETS = Layout(num_targets=2)
_REPLICAS = Layout(num_targets=2, num_drafts=2, is_proxied=True)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("kill-drafts", 100, "kills", _ONE, processes.kill_drafts),
        Scenario("kill-targets", 50, "kills", _ONE, processes.kill_targets),
        Scenario("stop-drafts", 5, "stops of 10 s", _ONE, processes.stop_drafts),
        Scenario("stop-targets", 5, "stops of 10 s", _TWO_TARGETS, processes.stop_targets),
        Scenario("link-faults", 500, "faults", _REPLICAS, links.link_faults),
        Scenario("fuzz", 100_000, "messages", _ONE, fuzz.fuzz),
        Scenario("crowd", 1000, "streams at once", _ONE, crowds.crowd),
        Scenario("deaf-readers", 200, "readers that never read", _ONE, crowds.deaf_readers),
        Scenario("churn", 1800, "seconds", _ONE, crowds.churn),
    )
}
