"""Records of a session's steps: enough to count, trace and return all that happened, without its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.ports import Extend, ItemTiming, Proposal, Release, Score, Scores
from outrider.types import CandidateLogprobs, FinishReason, TokenLogprob, TokenScores
from outrider_coordinator.session.actions import DraftWaitBegan, DraftWaitEnded, Finish, StepEnded, ToDraft, ToTarget
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.state import SessionStatus
from outrider_coordinator.session.transitions import end_step
from outrider_coordinator.speculation import DraftLengthPolicy
from outrider_coordinator.stats.spec_decode_stats import WithoutDraft
from tests.coordinator.setting import METHODS, OTHER_ROWS, ROWS, Setting, mixed_rows, plan_of
from tests.coordinator.text.tokenizer_kinds import llama_2

TIMING = ItemTiming(1, 2, 3, 4, 10)


@pytest.mark.parametrize("rows", [ROWS, OTHER_ROWS, mixed_rows], ids=["equal", "unrelated", "mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_add_up_to_the_session(rows: Any, method: Any) -> None:
    driven = Setting(draft_rows=rows).run(plan_of(method=method, max_tokens=40))
    steps, tokens, stats = driven.steps, driven.loop.tokens, driven.loop.spec_stats
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert [step.base_length for step in steps] == [
        tokens.prompt_length + sum(len(step.token_ids) for step in steps[:index]) for index in range(len(steps))
    ]
    assert tuple(token for step in steps for token in step.token_ids) == tokens.output
    for step in steps[:-1]:
        assert len(step.token_ids) == step.num_accepted + 1
    assert steps[0].no_draft_reason is WithoutDraft.PREFILL
    assert sum(step.num_draft_tokens for step in steps) == stats.num_draft_tokens
    assert sum(step.num_accepted for step in steps) == stats.num_accepted_tokens


def started(**fields: Any) -> tuple[SessionLoop, list[Any]]:
    """A greedy session whose prefill is under way, and what it asked for."""
    loop = SessionLoop(plan_of(temperature=0.0, **fields), DraftLengthPolicy(2), draft=DraftFacts())
    loop.start(1)
    return loop, loop.take_actions()


def command(actions: list[Any], kind: type) -> Any:
    """The last command of that kind."""
    return [act.command for act in actions if isinstance(act, ToDraft | ToTarget) and isinstance(act.command, kind)][-1]


def scores(score: Score, *token_ids: int) -> Scores:
    return Scores(1, score.generation, score.num_kept_tokens + len(score.token_ids), TokenScores(token_ids))


def test_a_step_is_said_before_the_commands_of_the_next() -> None:
    loop, actions = started()
    extend = command(actions, Extend)
    loop.on_draft_event(Proposal(1, extend.generation, 3, ()))
    loop.on_target_event(scores(command(actions, Score), 5), timing=TIMING)
    ended, waits, asks = loop.take_actions()
    assert isinstance(ended, StepEnded)
    assert (ended.token_ids, ended.timing) == ((5,), TIMING)
    assert waits == DraftWaitBegan(2)
    assert isinstance(asks, ToDraft)
    loop.on_draft_event(Proposal(1, asks.command.generation, 4, (6, 7)), timing=TIMING)
    came, sends = loop.take_actions()
    assert came == DraftWaitEnded(TIMING)
    assert isinstance(sends, ToTarget)


def test_every_wait_for_a_proposal_ends_once_however_it_ends() -> None:
    def answer(loop: SessionLoop, actions: list[Any]) -> None:
        loop.on_draft_event(Proposal(1, command(actions, Extend).generation, 4, (6,)))

    ways = (
        answer,
        lambda loop, _: loop.draft_timed_out(loop.step),
        lambda loop, _: loop.draft_lost(),
        lambda loop, _: loop.cancel(),
        lambda loop, _: loop.expire(),
    )
    for way in ways:
        loop, actions = started()
        loop.on_draft_event(Proposal(1, command(actions, Extend).generation, 3, ()))
        loop.on_target_event(scores(command(actions, Score), 5))
        waiting = loop.take_actions()
        assert loop.status is SessionStatus.DRAFTING
        way(loop, waiting)
        way(loop, waiting)
        said = loop.take_actions()
        assert sum(isinstance(action, DraftWaitEnded) for action in said) == 1, way


def test_two_answers_to_one_question_count_once() -> None:
    loop, actions = started()
    answer = scores(command(actions, Score), 5)
    loop.on_target_event(answer)
    loop.on_target_event(answer)
    assert sum(isinstance(action, StepEnded) for action in loop.take_actions()) == 1
    assert loop.spec_stats.num_stale_target_replies == 1


def test_only_scores_of_the_question_under_way_are_judged() -> None:
    """A verdict that was reached for other scores is never taken, even where a later answer guesses a generation."""
    loop, actions = started()
    first = scores(command(actions, Score), 5)
    guessed = Scores(1, first.generation + 9, 4, TokenScores((6,)))
    loop.on_target_event(guessed)
    loop.on_target_event(first)
    loop.on_target_event(guessed)
    assert loop.tokens.output == (5,)
    assert loop.spec_stats.num_stale_target_replies == 2


def test_a_step_that_a_token_ends_has_the_logprobs_of_its_tokens_alone() -> None:
    loop, actions = started(stop_token_ids=(6,), num_logprobs=0)
    loop.on_draft_event(Proposal(1, command(actions, Extend).generation, 3, ()))
    loop.on_target_event(with_logprobs(scores(command(actions, Score), 5)))
    loop.on_draft_event(Proposal(1, command(loop.take_actions(), Extend).generation, 4, (6, 7)))
    loop.on_target_event(with_logprobs(scores(command(loop.take_actions(), Score), 6, 7, 1)))
    (ended,) = [action for action in loop.take_actions() if isinstance(action, StepEnded)]
    assert ended.token_ids == (6,) and loop.is_over
    assert ended.logprobs == (TokenLogprob(6, -0.5, 1, ()),)


def with_logprobs(event: Scores) -> Scores:
    assert isinstance(event.form, TokenScores)
    none, nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    half, first = np.array([-0.5], dtype=np.float32), np.ones(1, dtype=np.int32)
    own = [np.array([token_id], dtype=np.int32) for token_id in event.form.token_ids]
    return replace(event, logprobs=tuple(CandidateLogprobs(ids, half, first, none, nothing) for ids in own))


def test_a_stop_text_found_late_keeps_its_own_tokens_and_releases_the_session() -> None:
    tokenizer = llama_2()
    newline, word = (tokenizer.backend.token_to_id(token) for token in ("<0x0A>", "world"))
    assert newline is not None and word is not None
    plan = plan_of(max_tokens=10, stop=("\n",), num_logprobs=0)
    loop = SessionLoop(plan, DraftLengthPolicy(2), draft=DraftFacts(), tokenizer=tokenizer)
    loop.start(1)
    loop.take_actions()
    new = [word, newline, word]
    loop.tokens.extend(new)
    loop.output.num_remaining -= len(new)
    logprobs = tuple(TokenLogprob(token_id, -0.5, 1, ()) for token_id in new)
    ended = StepEnded(1, 3, 2, 2, new, WithoutDraft.NOTHING_PROPOSED, None, logprobs)
    step = end_step(loop, ended, None, is_drafting=False)
    assert (step.token_ids, step.logprobs) == (new[:2], logprobs[:2])
    assert loop.is_over
    to_draft, to_target, finish = loop.take_actions()
    assert isinstance(to_draft, ToDraft) and isinstance(to_draft.command, Release)
    assert isinstance(to_target, ToTarget) and isinstance(to_target.command, Release)
    assert finish == Finish(FinishReason.STOP, "\n")
    assert (loop.output.logprobs, loop.tokens.output) == (logprobs[:2], tuple(new[:2]))
    loop.spec_stats.count_step(step)
    assert (loop.spec_stats.num_emitted_tokens, loop.spec_stats.mean_acceptance_length) == (2, 3)
