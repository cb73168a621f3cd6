"""The drafts of a burst are brought their text after the last prompt's verdict, beside the step under way."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from outrider.benchmarks.step.stand_in import make_draft, make_target
from outrider.config import CoordinatorSettings
from outrider.demo import TARGET
from outrider.generation import GenerationRequest
from outrider.ports import Extend
from outrider.types import SamplingParams
from outrider_coordinator.service import Coordinator
from outrider_coordinator.session.actions import ToDraft
from outrider_coordinator.session.loop import SessionLoop

NUM_USERS, NUM_PROMPT = 4, 64


async def _generate(coordinator: Coordinator, user: int) -> int:
    request = GenerationRequest(
        prompt_token_ids=tuple((user * 31 + place) % 2048 for place in range(NUM_PROMPT)),
        max_tokens=32,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
        seed=user,
    )
    return sum([len(delta.token_ids) async for delta in coordinator.generate_stream(request)])


async def test_texts_leave_right_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    brought: Counter[int] = Counter()
    prefill_draft = SessionLoop.prefill_draft

    def noting(loop: SessionLoop) -> None:
        prefill_draft(loop)
        commands = [action.command for action in loop.actions if isinstance(action, ToDraft)]
        brought[loop.commands.session] += any(
            isinstance(command, Extend) and not command.draft_length and len(command.token_ids) >= NUM_PROMPT
            for command in commands
        )

    monkeypatch.setattr(SessionLoop, "prefill_draft", noting)
    target = make_target(busy_s=2e-3, acceptance=0.8, note=lambda *_: None)
    draft = make_draft(busy_s=1e-3, acceptance=0.8, note=lambda *_: None)
    coordinator = Coordinator(target, draft, CoordinatorSettings.model_validate({"tokenizer": str(TARGET)}))
    await coordinator.start()
    try:
        counts = await asyncio.gather(*(_generate(coordinator, user) for user in range(NUM_USERS)))
    finally:
        await coordinator.close()
    assert counts == [32] * NUM_USERS
    assert sum(brought.values()) >= 2  # one computed its prompt beside the target, and one asked by itself
    assert max(brought.values()) == 1
