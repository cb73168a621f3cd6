"""Drafts that go on from a guess of the bonus token under rejection: they save time and never change a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from outrider.generation import GenerationResult
from outrider.model_executor.distributed import runner
from tests.end_to_end.test_direct_proposals import (
    DRAFT,
    GREEDY,
    PATIENT,
    SAMPLED,
    TARGET,
    check_same,
    introduced,
    num_direct,
    requests,
    together,
)
from tests.end_to_end.test_draft_ahead import steps
from tests.end_to_end.waiting import again_until, all_free
from tests.support.draft_loops import LoopedRunner
from tests.support.stack import Stack, run_stack


@pytest.fixture(autouse=True)
def _loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ModelRunner", LoopedRunner)


async def play(stack: Stack, found: list[GenerationResult]) -> None:
    """The same tokens every time: of a session alone and of several together."""
    results = await together(stack, SAMPLED, max_tokens=16)
    found[:] = found or results
    check_same(results, found)
    alone = [await stack.generate(**request) for request in requests(SAMPLED, max_tokens=16)[:3]]
    check_same(alone, found[:3])


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "rejection"])
async def test_a_request_turns_it_off_for_itself(rule: dict[str, Any]) -> None:
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead="chain", **PATIENT) as stack:
        await introduced(stack)
        for request in requests(rule, max_tokens=16)[:2]:
            result = await stack.generate(**request, draft_ahead=False)
            assert not result.timing.num_drafts_ahead and result.speculation.num_draft_tokens
        assert num_direct(stack) and steps(stack, "used") == steps(stack, "unused") == 0


@pytest.mark.parametrize(("draft", "outcome"), [(TARGET, "used"), (DRAFT, "unused")], ids=["same model", "other draft"])
async def test_tokens_are_those_of_drafting_in_turn(draft: Any, outcome: str) -> None:
    """Even the draws are the same: what is claimed is what would have been proposed."""
    in_turn: list[GenerationResult] = []
    async with run_stack(TARGET, draft, wire=True, draft_ahead="in_turn", **PATIENT) as stack:
        await introduced(stack)
        await play(stack, in_turn)
        assert steps(stack, "used") == steps(stack, "unused") == 0
    async with run_stack(TARGET, draft, wire=True, draft_ahead="chain", **PATIENT) as stack:
        await introduced(stack)
        await again_until(lambda: steps(stack, outcome) > 5, partial(play, stack, in_turn))
        assert steps(stack, outcome) > 5
        await all_free(stack)
