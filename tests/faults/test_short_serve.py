"""The short form of the fault suite, under `outrider serve`; a file of its own, so that it may run beside the rest."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.report import Result
from tests.faults.run import prepared
from tests.faults.scenarios import serve
from tests.faults.served import Output, run_served
from tests.faults.test_short import LONGEST, SEED, check

pytestmark = pytest.mark.timeout(1800)


def test_serve_goes_on_when_its_output_cannot_be_written() -> None:
    output = Output.CLOSED_PIPE  # the long form takes the others too

    async def play() -> Result:
        async with run_served(output) as stack, prepared(stack, seed=SEED, num_requests=6, longest=LONGEST) as shared:
            run = shared.run(stack, f"serve, {output}", seed=SEED, count=20, scale=0.0, say=print)
            await serve.serve(run)
            return run.result

    check(asyncio.run(play()))
