"""Drafts that begin at the target's verdict: they save time and never change a token, whatever becomes of verdicts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.generation import GenerationResult
from outrider.proposal_channel import receiver as receiving
from outrider.proposal_channel.verdicts import Verdicts, verdicts_on
from outrider_coordinator.routing.channel_introductions import ChannelIntroductions
from outrider_coordinator.speculation import order
from tests.end_to_end.faults import outage
from tests.end_to_end.test_direct_proposals import (
    COUPLED,
    DRAFT,
    GREEDY,
    PATIENT,
    TARGET,
    check_same,
    introduced,
    requests,
    together,
)
from tests.end_to_end.waiting import again_until, all_free, eventually
from tests.support.coordinator_stats import stats_of
from tests.support.dflash import build_dflash
from tests.support.eagle3 import build_eagle3
from tests.support.stack import Stack, run_stack

MODES = pytest.mark.parametrize("draft_ahead", ["verdict", "chain"])
RULES = pytest.mark.parametrize("rule", [GREEDY, COUPLED], ids=["greedy", "coupled"])
NUM_ALONE = 2
"""Requests that are also played one after the other, which takes most of the time of these tests."""
FEW_PAGES: dict[str, Any] = {"page_size": 4, "num_pages": 60}


def steps(stack: Stack, outcome: str) -> int:
    """Proposals of the draft that were begun before they were asked for."""
    assert stack.draft is not None
    labels = (("outcome", outcome),)
    return int(
        next(
            each.value  # type: ignore[arg-type]
            for each in stack.draft.readings()
            if each.name == "outrider_lookahead_steps_total" and each.labels == labels
        )
    )


async def alone(stack: Stack, rule: dict[str, Any]) -> list[GenerationResult]:
    """The first of the same requests one after the other: every step of one goes directly."""
    return [await stack.generate(**request) for request in requests(rule)[:NUM_ALONE]]


_EXPECTED: dict[str, list[GenerationResult]] = {}


async def expected_of(rule: dict[str, Any]) -> list[GenerationResult]:
    """Results of the target alone, which are generated once for each rule."""
    if (key := repr(rule)) not in _EXPECTED:
        async with run_stack(TARGET, None, wire=True) as stack:
            _EXPECTED[key] = [await stack.generate(**request) for request in requests(rule)]
    return _EXPECTED[key]


async def check_played(
    stack: Stack, rule: dict[str, Any], expected: list[GenerationResult], *, outcome: str = "used"
) -> None:
    """Outputs alone and together, again until proposals that were begun have ended so; pages are free afterwards."""
    await introduced(stack)

    async def play() -> None:
        check_same(await alone(stack, rule), expected[:NUM_ALONE])
        check_same(await together(stack, rule), expected)

    await again_until(lambda: steps(stack, outcome) > 20, play)
    assert steps(stack, outcome) > 20
    await all_free(stack)


@RULES
@MODES
@pytest.mark.parametrize("draft", [DRAFT, TARGET], ids=["other draft", "same model"])
async def test_tokens_are_those_of_the_target_alone(draft: Any, draft_ahead: str, rule: dict[str, Any]) -> None:
    expected = await expected_of(rule)
    async with run_stack(TARGET, draft, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        # A chain is of no use where no guess is right.
        outcome = "unused" if draft_ahead == "chain" and draft == DRAFT else "used"
        await check_played(stack, rule, expected, outcome=outcome)


async def test_an_order_that_changes_all_the_time_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[bool] = []
    monkeypatch.setattr(order, "TOKENS_OF_WINDOW", 4)
    monkeypatch.setattr(order, "FIRST_TRIAL_S", 0.0)
    take = ChannelIntroductions.take_order

    def note(channels: ChannelIntroductions, target: object, is_ahead: bool) -> None:
        changes.append(is_ahead)
        take(channels, target, is_ahead)

    monkeypatch.setattr(ChannelIntroductions, "take_order", note)
    expected = await expected_of(COUPLED)
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead="auto", **PATIENT) as stack:
        # How often the order changes while requests play once depends on how long their steps take.
        await again_until(lambda: len(changes) > 20, lambda: check_played(stack, COUPLED, expected))
        assert changes.count(True) > 3 < changes.count(False)


async def test_the_setting_turns_it_off() -> None:
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead="in_turn", **PATIENT) as stack:
        await introduced(stack)
        results = await alone(stack, GREEDY)
        assert steps(stack, "used") == steps(stack, "unused") == 0
        assert not any(result.timing.num_drafts_ahead for result in results)


async def test_a_result_tells_how_many_proposals_were_begun_ahead() -> None:
    async with run_stack(TARGET, TARGET, wire=True, **PATIENT) as stack:
        await introduced(stack)
        results: list[GenerationResult] = []

        async def play() -> None:
            results.extend(await alone(stack, GREEDY))

        def num_told() -> int:
            return sum(result.timing.num_drafts_ahead for result in results)

        await again_until(lambda: num_told() > 3, play)
        # Some are asked for between their verdict and their forward.
        assert 3 < num_told() <= steps(stack, "used")


async def test_pushed_proposals_are_told_too() -> None:
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead="chain", **PATIENT) as stack:
        await introduced(stack)
        results: list[GenerationResult] = []

        async def play() -> None:
            results.extend(await alone(stack, GREEDY))

        def num_told() -> int:
            return sum(each.timing.num_drafts_ahead for each in results)

        await again_until(lambda: num_told() > 3, play)
        assert 3 < num_told() <= sum(each.speculation.num_steps for each in results)


async def test_nothing_is_begun_where_the_coordinator_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_stack(TARGET, TARGET, wire=True, **PATIENT) as stack:
        await introduced(stack)
        await alone(stack, {"temperature": 1.0, "acceptance_method": "rejection"})
        assert steps(stack, "used") == steps(stack, "unused") == 0


Fault = Callable[[random.Random, Verdicts], Verdicts | None]


def lost(chance: random.Random, verdicts: Verdicts) -> Verdicts | None:
    return None if chance.random() < 0.5 else verdicts


def forged(chance: random.Random, verdicts: Verdicts) -> Verdicts | None:
    changes = {
        "next_token_ids": (verdicts.next_token_ids + 1) % 200,
        "num_accepted": verdicts.num_accepted + 1,
        "base_lengths": verdicts.base_lengths - 1,
        "generations": verdicts.generations + 50,
        "sessions": verdicts.sessions + 1,
        "last_token_ids": (verdicts.last_token_ids + 1) % 200,
    }
    name = chance.choice(list(changes))
    return replace(verdicts, **{name: changes[name]}) if chance.random() < 0.5 else verdicts


class Stale:
    """Each verdict is sent in place of the one after it, sometimes."""

    def __init__(self) -> None:
        self._old: Verdicts | None = None

    def __call__(self, chance: random.Random, verdicts: Verdicts) -> Verdicts | None:
        old, self._old = self._old, verdicts
        return old if old is not None and chance.random() < 0.5 else verdicts


@MODES
@pytest.mark.parametrize("fault", [lost, forged, Stale()], ids=["lost", "forged", "stale"])
async def test_verdicts_that_go_wrong_change_no_token(
    draft_ahead: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, chance = await expected_of(COUPLED), random.Random(3)

    def sent(scores: Any) -> Verdicts | None:
        honest = verdicts_on(scores)
        return None if honest is None else fault(chance, honest)

    monkeypatch.setattr(receiving, "verdicts_on", sent)
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await check_played(stack, COUPLED, expected)


@MODES
async def test_ends_of_requests_are_where_the_target_alone_ends(draft_ahead: str) -> None:
    """Stop texts, stop tokens, several choices, few tokens: what was begun beyond them goes with the session."""
    plain = (await expected_of(COUPLED))[0]
    async with run_stack(TARGET, None, wire=True) as stack:
        ends: list[dict[str, Any]] = [
            {"stop": [plain.text[5:7]]},
            {"stop_token_ids": [plain.token_ids[9]]},
            {"max_tokens": 6},
            {"min_tokens": 12, "stop_token_ids": [plain.token_ids[3]]},
            {"presence_penalty": 0.6},
            {"frequency_penalty": 0.9, "repetition_penalty": 1.3},
            {"logit_bias": {plain.token_ids[2]: -5.0}},
        ]
        base = {key: value for key, value in requests(COUPLED)[0].items() if key not in ("ignore_eos", "max_tokens")}
        asked = [{**base, "max_tokens": 40, **end} for end in ends]
        expected = [await stack.generate(**request) for request in asked]
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await introduced(stack)
        check_same([await stack.generate(**request) for request in asked], expected)
        check_same(list(await asyncio.gather(*[stack.generate(**request) for request in asked])), expected)
        await all_free(stack)


@MODES
async def test_few_pages_change_no_token(draft_ahead: str) -> None:
    expected = await expected_of(GREEDY)
    settings: dict[str, Any] = {
        "target_settings": FEW_PAGES,
        "draft_settings": FEW_PAGES,
        "draft_ahead": draft_ahead,
        **PATIENT,
    }
    async with run_stack(TARGET, TARGET, wire=True, **settings) as stack:
        await introduced(stack)
        for _ in range(3):
            check_same(await together(stack, GREEDY), expected)
        check_same(await alone(stack, GREEDY), expected[:NUM_ALONE])
        await all_free(stack)


@MODES
async def test_a_draft_that_dies_with_begun_proposals_changes_no_token(draft_ahead: str) -> None:
    expected = await expected_of(GREEDY)
    async with run_stack(TARGET, TARGET, wire=True, draft_ahead=draft_ahead, **PATIENT) as stack:
        await introduced(stack)
        await again_until(lambda: steps(stack, "used") > 0, lambda: alone(stack, GREEDY))
        assert steps(stack, "used")
        running = asyncio.ensure_future(together(stack, GREEDY))
        await eventually(lambda: stats_of(stack.coordinator).num_running > 2, "requests")
        async with outage(stack, "draft"):
            await asyncio.sleep(0)
        check_same(await running, expected)
        await all_free(stack)


@pytest.mark.parametrize(
    ("method", "write", "rule"), [("eagle3", build_eagle3, COUPLED), ("dflash", build_dflash, GREEDY)]
)
async def test_drafts_that_read_states_begin_too(
    method: str, write: Callable[[Path], Path], rule: dict[str, Any], tmp_path: Path
) -> None:
    expected = await expected_of(rule)
    settings = {"method": method, "target_model": str(TARGET)}
    async with run_stack(TARGET, write(tmp_path), wire=True, draft_settings=settings, **PATIENT) as stack:
        await check_played(stack, rule, expected)
