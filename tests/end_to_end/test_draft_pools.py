"""One draft for two targets, each with a coordinator of its own: a burst of one changes no token of the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.config import CoordinatorSettings, TargetSettings
from outrider.generation import GenerationResult
from outrider.transport.remote import RemoteDraft, RemoteTarget
from outrider.transport.server import serve_target
from outrider_coordinator.service import Coordinator
from outrider_target.service import TargetService
from tests.end_to_end.test_direct_proposals import COUPLED, DRAFT, GREEDY, PATIENT, TARGET, check_same, introduced
from tests.end_to_end.test_fairness import ask_coordinator
from tests.end_to_end.waiting import all_free, eventually
from tests.support.stack import Stack, run_stack

NUM_BURST, NUM_OTHERS = 12, 2
SETTINGS: dict[str, Any] = {"draft_length": "fixed", "num_speculative_tokens": 4, "channels_between_hosts": True}


@contextlib.asynccontextmanager
async def second_target(stack: Stack, draft_ahead: str) -> AsyncIterator[Stack]:
    """Another target, whose coordinator drafts with the first one's draft."""
    async with contextlib.AsyncExitStack() as cleanup:
        model = {"model": str(DRAFT), "num_threads": 1, "cost_profile_s": 0}
        target = TargetService.load(TargetSettings.model_validate(model))
        cleanup.push_async_callback(target.close)
        server = await serve_target(target, host="127.0.0.1", port=0, admit_channel=target.admit_channel)
        cleanup.push_async_callback(server.stop)
        settings = CoordinatorSettings.model_validate({**SETTINGS, **PATIENT, "draft_ahead": draft_ahead})
        draft = RemoteDraft(stack.addresses["draft"])
        coordinator = Coordinator(RemoteTarget(server.address), draft, settings)
        cleanup.push_async_callback(coordinator.close)
        await coordinator.start()
        yield Stack(target, stack.draft, coordinator, None)


def requests(number: int, rule: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    common = {"max_tokens": 40, "ignore_eos": True, **rule, **more}
    return [{**common, "prompt_token_ids": [9, 8, first], "seed": first} for first in range(number)]


async def ask(stack: Stack, asked: list[dict[str, Any]]) -> list[GenerationResult]:
    return list(await asyncio.gather(*[ask_coordinator(stack, **request) for request in asked]))


@pytest.mark.parametrize(("rule", "draft_ahead"), [(GREEDY, "chain"), (COUPLED, "verdict")])
@pytest.mark.parametrize("host", ["this host", "another host"])
async def test_a_burst_changes_no_token_of_the_other_target(
    rule: dict[str, Any], draft_ahead: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "another host":
        monkeypatch.setattr("outrider_draft.service.channel_host", lambda: host)
    ahead: dict[str, Any] = {**SETTINGS, **PATIENT, "draft_ahead": draft_ahead}
    async with run_stack(TARGET, TARGET, wire=True, **ahead) as first, second_target(first, draft_ahead) as second:
        for stack in (first, second):
            await introduced(stack)
        plain = {"num_speculative_tokens": 0}
        burst, others = requests(NUM_BURST, rule), requests(NUM_OTHERS, rule)
        expected = [
            await ask(first, requests(NUM_BURST, rule, **plain)),
            await ask(second, requests(NUM_OTHERS, rule, **plain)),
        ]
        found = await asyncio.gather(ask(first, burst), ask(second, others))
        for results, alone in zip(found, expected, strict=True):
            check_same(results, alone)
            assert all(result.speculation.num_draft_tokens > 10 for result in results)
        await eventually(lambda: not second.target.num_sessions, "no sessions at the second target")
        await all_free(first)
