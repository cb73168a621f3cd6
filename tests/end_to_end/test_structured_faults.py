"""Grammars under faults: services that break, sessions that are lost or preempted in the middle of JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.end_to_end.faults import gate_of, lose_sessions, outage
from tests.end_to_end.waiting import Reader, all_free
from tests.support.coordinator_stats import stats_of
from tests.support.stack import run_stack

PAIR = Path(__file__).parents[2] / "outrider" / "demo" / "pair"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "requires_registration": {"enum": ["yes", "no"]},
        "sizes": {"type": "array", "items": {"enum": ["small", "large"]}, "minItems": 8, "maxItems": 8},
    },
    "required": ["requires_registration", "sizes"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"prompt": "sizes = ", "json_schema": SCHEMA, "max_tokens": 200, "temperature": 0, "seed": 3}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 1.0}
COUPLED: dict[str, Any] = {**SAMPLED, "acceptance_method": "coupled"}


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("role", ("draft", "target"))
@pytest.mark.parametrize("options", (GREEDY, COUPLED), ids=("greedy", "coupled"))
async def test_a_service_that_breaks_in_the_middle_changes_no_token(options: dict[str, Any], role: str) -> None:
    async with run_stack(PAIR / "target", PAIR / "draft", wire=True, draft_timeout_ms=60_000) as stack:
        expected = await stack.generate(**options)
        check(expected.text)
        with gate_of(stack.target.runner) as gate:
            reader = Reader(stack, **options)
            await reader.read(len(expected.token_ids) // 3)
            await gate.shut()
            async with outage(stack, role):
                gate.open()
            await reader.finish()
        assert tuple(reader.token_ids) == expected.token_ids
        await all_free(stack)


@pytest.mark.parametrize("role", ("draft", "target"))
async def test_a_lost_session_is_rebuilt_with_its_grammar(role: str) -> None:
    async with run_stack(PAIR / "target", PAIR / "draft", wire=False, draft_timeout_ms=60_000) as stack:
        expected = await stack.generate(**SAMPLED)
        lose_sessions(getattr(stack, role), at_item=4)
        result = await stack.generate(**SAMPLED)
        assert result.token_ids == expected.token_ids and result.speculation == expected.speculation
        check(result.text)
        spec_stats = stats_of(stack.coordinator).spec_stats
        assert spec_stats.num_target_losses + spec_stats.num_draft_losses == 1


async def test_preempted_sessions_go_on_with_their_grammars() -> None:
    cases = [{**options, "seed": seed} for seed in range(2) for options in (GREEDY, COUPLED)]
    pages: dict[str, Any] = {"num_pages": 16, "page_size": 16}
    async with run_stack(
        PAIR / "target", PAIR / "draft", wire=False, draft_timeout_ms=60_000, target_settings=pages
    ) as stack:
        expected = [await stack.generate(**case) for case in cases]
        found = await asyncio.gather(*(stack.generate(**case) for case in cases))
        assert [result.token_ids for result in found] == [result.token_ids for result in expected]
        for result in found:
            check(result.text)
        preempted = [each.value for each in stack.target.readings() if each.name == "outrider_sessions_preempted_total"]
        assert preempted != [0]
        await all_free(stack)
