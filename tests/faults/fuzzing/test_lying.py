"""Services that lie in random ways: the coordinator serves on, and what they take no part in is right.

The long form is run by hand: ``python -m tests.faults.fuzzing.traffic_beside_liars``.
"""

from __future__ import annotations

import pytest

from tests.faults.fuzzing.traffic_beside_liars import Run

NUM_ANSWERS = 300


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_service_that_lies_harms_its_own_sessions_at_most(role: str) -> None:
    outcome = await Run(role, 5, NUM_ANSWERS).run()
    assert outcome.num_answers >= NUM_ANSWERS and outcome.num_lies >= 10
    assert outcome.num_checked > 20
    assert (outcome.num_wrong, outcome.num_failed) == (0, 0)
