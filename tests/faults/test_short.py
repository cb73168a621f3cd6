"""The short form of the fault suite: tokens, pages and hangs. Gaps and memory are ``make soak``'s to measure.

One stack with replicas and proxies serves every scenario. The seed is fixed here and printed with every fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.faults.report import Result
from tests.faults.run import Prepared, prepared
from tests.faults.scenarios.table import SCENARIOS
from tests.faults.stack import Layout, Stack, run_stack

SEED = 11
NUM_REQUESTS, LONGEST = 16, 60
PATIENT = {"target_timeout_s": 600, "draft_timeout_ms": 2000}
"""Processes start slowly on a busy machine."""
LAYOUT = Layout(num_targets=2, is_proxied=True, coordinator={**PATIENT, "max_logprobs": 100})
COUNTS = {
    "kill-drafts": 1,
    "kill-targets": 1,
    "kill-coordinators": 1,
    "stop-drafts": 1,
    "stop-targets": 1,
    "hang-drafts": 1,
    "hang-targets": 1,
    "link-faults": 10,
    "fuzz": 200,
    "crowd": 30,
    "deaf-readers": 2,
    "churn": 3,
}

EXACT = (
    "streams different",
    "streams failed",
    "streams hung",
    "sessions and pages left",
    "crashes",
    "processes lost",
    "UNKNOWN, INTERNAL or hung",
    "of these ended by an error",
    "supervisor ended early",
    "exit code after SIGTERM",
    "processes left",
)
"""Figures that are zero on any machine."""

pytestmark = pytest.mark.timeout(1800)


@dataclass
class Suite:
    """A stack that several scenarios use in turn, and the loop it lives on."""

    runner: asyncio.Runner
    stack: Stack
    shared: Prepared

    def play(self, name: str) -> Result:
        run = self.shared.run(self.stack, name, seed=SEED, count=COUNTS[name], scale=0.0, say=print)
        self.runner.run(SCENARIOS[name].play(run))
        return run.result


@pytest.fixture(scope="module")
def suite() -> Iterator[Suite]:
    cleanup = AsyncExitStack()

    async def start() -> tuple[Stack, Prepared]:
        stack = await cleanup.enter_async_context(run_stack(LAYOUT))
        shared = prepared(stack, seed=SEED, num_requests=NUM_REQUESTS, longest=LONGEST, say=print)
        return stack, await cleanup.enter_async_context(shared)

    with asyncio.Runner() as runner:
        try:
            yield Suite(runner, *runner.run(start()))
        finally:
            runner.run(cleanup.aclose())


@pytest.mark.parametrize("name", COUNTS)
def test_every_stream_is_its_twin_and_every_page_is_free(suite: Suite, name: str) -> None:
    result = suite.play(name)
    check(result)


def check(result: Result) -> None:
    figures = {figure.name: figure.value for figure in result.figures}
    assert figures["streams"] > 0
    wrong = {name: figures[name] for name in EXACT if figures.get(name)}
    assert not wrong, (f"seed {result.seed}", result.problems)
