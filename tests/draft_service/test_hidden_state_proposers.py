"""Proposers that read the target's hidden states, between a real target and a real session loop.

The proposer of these tests applies the target's own head to the last hidden state: what it guesses for the token after
the last is thereby known exactly, and a state of a wrong position shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.ports import Extend, HiddenStateChunk, Open, Proposal, SessionFailed, SessionLost
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.types import LAST_HIDDEN_STATE, HiddenStates, JudgingRule, SamplingParams
from outrider_draft.proposers.base import DraftTokens, ProposalRequest, Proposer
from outrider_draft.proposers.registry import without_kv
from outrider_draft.proposers.state_heads import as_tensor
from outrider_draft.service import build_core
from tests.model_executor.parity import random_ids
from tests.support.service_rig import ServiceRig
from tests.support.tiny_models import cached_tiny_model, load_reference

HIDDEN = 32
CPU = torch.device("cpu")


class Checking(Proposer):
    """Compares each state with what transformers says of the text, and proposes what follows greedily."""

    hidden_state_layers = (LAST_HIDDEN_STATE, 1)
    hidden_size = HIDDEN
    vocab_size = 272

    def __init__(self, folder: Path, *, reads_all: bool, is_right: bool = True) -> None:
        self.model: Any = load_reference(folder)
        self.reads_all_states = reads_all
        self.is_right = is_right
        self.num_rows = 0

    @torch.no_grad()
    def propose(self, requests: Sequence[ProposalRequest]) -> list[DraftTokens]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: ProposalRequest) -> DraftTokens:
        text, states = list(request.token_ids), request.hidden_states
        assert states is not None
        found = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = torch.cat([found[-1][0], found[1][0]], dim=-1)
        assert states.end == len(text) - 1
        rows = as_tensor(states, device=CPU, dtype=torch.float32)
        torch.testing.assert_close(rows, expected[states.start : states.end], atol=1e-4, rtol=1e-3)
        if self.reads_all_states:
            assert states.start <= request.state.get("end", 0)
            request.state["end"] = states.end
        self.num_rows += states.num_rows
        drafted: list[int] = []
        for _ in range(request.num_tokens):
            logits = self.model(torch.tensor([[*text, *drafted]])).logits[0, -1]
            drafted.append(int(logits[:256].argmax() if self.is_right else logits[:256].argmin()))
        return DraftTokens(drafted)


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached_tiny_model("llama", seed=1)


def options(seed: int, length: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": tuple(token % 256 for token in random_ids(length, seed)),
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0.0,
        **more,
    }


REQUESTS = [options(1, 1), options(2, 9), options(3, 30), options(3, 30), options(4, 2)]


def plain(folder: Path, requests: list[dict[str, Any]]) -> list[list[int]]:
    return ServiceRig(folder, None).generate(requests)


@pytest.mark.parametrize("reads_all", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_output_is_the_targets_and_states_are_those_of_the_text(folder: Path, reads_all: bool, is_right: bool) -> None:
    proposer = Checking(folder, reads_all=reads_all, is_right=is_right)
    rig = ServiceRig(folder, without_kv(proposer), num_speculative_tokens=3)
    assert rig.generate(REQUESTS) == plain(folder, REQUESTS)
    assert rig.num_draft_tokens > 0
    assert (rig.num_accepted_tokens == rig.num_draft_tokens) == is_right
    assert rig.num_pages_used() == 0


@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_draft_that_loses_its_sessions_gets_states_made_again(folder: Path, every: int) -> None:
    rig = ServiceRig(folder, without_kv(Checking(folder, reads_all=True)), num_speculative_tokens=3)
    count = 0

    def lose_some(event: Any) -> Any:
        nonlocal count
        count += 1
        lost = isinstance(event, Proposal) and count % every == 0
        return SessionLost(event.session, event.generation, "of the test") if lost else event

    rig.change_draft_event = lose_some
    assert rig.generate(REQUESTS) == plain(folder, REQUESTS)
    assert count > 10


def test_answers_that_hold_less_than_they_were_brought_lose_the_session(folder: Path) -> None:
    rig = ServiceRig(folder, without_kv(Checking(folder, reads_all=True)), num_speculative_tokens=3)
    rig.change_draft_event = lambda event: (
        Proposal(event.session, event.generation, 0, ()) if isinstance(event, Proposal) else event
    )
    assert rig.generate(REQUESTS) == plain(folder, REQUESTS)


def test_long_prompts_come_in_chunks(folder: Path) -> None:
    requests = [options(5, 200, max_tokens=5), options(6, 150, max_tokens=5)]
    rig = ServiceRig(
        folder, without_kv(Checking(folder, reads_all=True)), num_speculative_tokens=2, max_model_len=256,
        target_forward=32,
    )  # fmt: skip
    seen: list[Any] = []
    rig.watch_target = lambda run, asked, answer: seen.append(answer)
    assert rig.generate(requests) == ServiceRig(folder, None, max_model_len=256).generate(requests)
    assert sum(isinstance(event, HiddenStateChunk) for event in seen) > 5
    assert rig.num_draft_tokens > 0


OPEN = Open(1, 1, SamplingParams(), 3, JudgingRule.COUPLED, prompt_length=3, max_length=50, num_token_ids=256)


def states(start: int, rows: int, width: int = 2 * HIDDEN) -> HiddenStates:
    return HiddenStates(start, rows, width, "float32", bytes(4 * rows * width))


@pytest.mark.parametrize(
    "wrong", [states(0, 1), states(1, 2), states(0, 3), states(0, 2, HIDDEN), states(1, 1), states(0, 0)]
)
def test_states_of_other_positions_or_widths_fail_the_session(folder: Path, wrong: HiddenStates) -> None:
    core = build_core(without_kv(Checking(folder, reads_all=False)))
    core.handle(0, [OPEN, Extend(1, 2, 0, EMPTY_PREFIX, (1, 2, 3), 2, hidden_states=wrong)])
    (event,) = [event for _, batch in core.step() for event in batch.events]
    assert isinstance(event, SessionFailed)
    assert event.field == "hidden_states"


@pytest.mark.parametrize(("reads_all", "held"), [(True, 0), (False, 2)])
def test_without_states_a_draft_says_how_much_it_holds(folder: Path, reads_all: bool, held: int) -> None:
    core = build_core(without_kv(Checking(folder, reads_all=reads_all)))
    core.handle(0, [OPEN, Extend(1, 2, 0, EMPTY_PREFIX, (1, 2, 3), 0)])
    events = [event for _ in range(3) for _, batch in core.step() for event in batch.events]
    assert Proposal(1, 2, held, ()) in events
    assert prefix_hash([]) == EMPTY_PREFIX
