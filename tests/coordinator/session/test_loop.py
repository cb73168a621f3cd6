"""The state machine of one session, driven by hand against toy services: no event loop, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.errors import DeadlineError
from outrider.ports import (
    Extend,
    Open,
    Opened,
    Proposal,
    Release,
    Score,
    SessionFailed,
    SessionLost,
)
from outrider.prefix_hash import EMPTY_PREFIX, prefix_hash
from outrider.types import (
    AcceptanceMethod,
    FinishReason,
    SamplingParams,
)
from outrider_coordinator.session.actions import Fail, Finish
from outrider_coordinator.session.draft_side import DraftFacts
from outrider_coordinator.session.loop import SessionLoop
from outrider_coordinator.session.state import SessionStatus
from outrider_coordinator.speculation import DraftLengthPolicy
from tests.coordinator.driving import generate
from tests.coordinator.setting import METHODS, OTHER_ROWS, ROWS, VOCAB_SIZE, Setting, mixed_rows, own_tokens, plan_of
from tests.support.scripted_ports import ToyDraft, ToyTarget, reversed_rows

# The tokens.


@pytest.mark.parametrize("rows", [ROWS, OTHER_ROWS, reversed_rows(ROWS)], ids=["equal", "unrelated", "reversed"])
@pytest.mark.parametrize("draft_length", range(9))
def test_greedy_and_coupled_are_the_targets_own_tokens(rows: Any, draft_length: int) -> None:
    for fields in ({"temperature": 0.0}, {"method": AcceptanceMethod.COUPLED, "seed": 11}):
        plan = plan_of(**fields)
        setting = Setting(draft_rows=rows, draft_length=draft_length)
        driven = setting.run(plan)
        assert driven.token_ids == own_tokens(plan)
        assert driven.ending == Finish(FinishReason.LENGTH)
        assert setting.all_is_free()


@pytest.mark.parametrize("method", METHODS)
def test_temperature_0_is_greedy_under_every_method(method: AcceptanceMethod) -> None:
    plan = plan_of(temperature=0.0, method=method)
    assert Setting(draft_rows=OTHER_ROWS).run(plan).token_ids == own_tokens(plan_of(temperature=0.0))


def test_rejection_repeats_under_its_seed_whatever_else_runs() -> None:
    plan = plan_of(seed=5)
    alone = Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    crowded = Setting(draft_rows=OTHER_ROWS)
    others = [crowded.bench.add(plan_of(seed=seed, method=METHODS[seed % 3], max_tokens=9)) for seed in range(6)]
    crowded.bench.round()
    driven = crowded.run(plan)
    assert driven.token_ids == alone
    assert all(isinstance(other.ending, Finish) for other in others)
    assert Setting(draft_rows=OTHER_ROWS).run(plan_of(seed=6)).token_ids != alone


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_equal_to_the_target_is_always_accepted_by_exact_rules(method: AcceptanceMethod) -> None:
    spec_stats = Setting().run(plan_of(method=method, max_tokens=41)).loop.spec_stats
    if method is AcceptanceMethod.TYPICAL:
        assert 0 < spec_stats.num_accepted_tokens < spec_stats.num_draft_tokens
    else:
        assert spec_stats.num_accepted_tokens == spec_stats.num_draft_tokens == 32
        assert spec_stats.num_steps == 1 + 8


# The messages.


def test_cached_tokens_are_those_of_the_prompt_at_the_first_opening() -> None:
    """Text that was given out before may be cached beyond the prompt, and a rebuilt session finds its own pages."""
    plan = plan_of()
    loop = SessionLoop(plan, DraftLengthPolicy(0, is_controlled=False), draft=None)
    loop.start(7)
    prompt_length = len(plan.prompt_token_ids)
    for num_cached in (prompt_length + 5, 1):
        loop.on_target_event(Opened(7, loop.target.opened, num_cached))
        assert loop.num_cached_prompt_tokens == prompt_length


def test_prefill_goes_to_both_sides_at_once() -> None:
    bench = Setting().bench
    bench.add(plan_of(seed=9))
    opened, extend = bench.to_draft
    assert isinstance(opened, Open)
    assert isinstance(extend, Extend)
    assert (extend.token_ids, extend.draft_length, extend.num_kept_tokens, extend.prefix_hash) == (
        (1, 2, 3),
        0,
        0,
        EMPTY_PREFIX,
    )
    opened, score = bench.to_target
    assert isinstance(opened, Open)
    assert (opened.seed, opened.prompt_length, opened.max_length) == (9, 3, 27)
    assert isinstance(score, Score)
    assert (score.token_ids, score.draft_token_ids, score.support) == ((1, 2, 3), (), None)


@pytest.mark.parametrize("rows", [ROWS, OTHER_ROWS], ids=["good", "bad"])
@pytest.mark.parametrize("method", METHODS)
def test_at_most_one_command_is_unanswered_and_generations_rise(rows: Any, method: AcceptanceMethod) -> None:
    setting = Setting(draft_rows=rows)
    setting.bench.add(plan_of(method=method))
    while setting.bench.to_draft or setting.bench.to_target:
        assert sum(isinstance(command, Extend) for command in setting.bench.to_draft) <= 1
        assert sum(isinstance(command, Score) for command in setting.bench.to_target) <= 1
        setting.bench.round()
    for sent in (setting.bench.sent_to_draft, setting.bench.sent_to_target):
        generations = [command.generation for command in sent]
        assert generations == sorted(set(generations))
        assert isinstance(sent[-1], Release)


def test_every_command_brings_the_text_it_says() -> None:
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.run(plan_of())
    text = [1, 2, 3, *driven.token_ids]
    commands: list[Extend | Score] = [*setting.extends, *setting.scores]
    for command in commands:
        assert command.prefix_hash == prefix_hash(text[: command.num_kept_tokens])
        assert (
            list(command.token_ids) == text[command.num_kept_tokens : command.num_kept_tokens + len(command.token_ids)]
        )
        assert command.token_ids


def test_the_target_is_brought_one_token_a_step() -> None:
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.run(plan_of())
    assert [len(score.token_ids) for score in setting.scores] == [3] + [1] * (len(setting.scores) - 1)


def test_the_bonus_token_hole() -> None:
    """Extend brings two tokens after all K drafts were accepted: the draft has no KV for the last of them."""
    setting = Setting(draft_length=3)
    tokens = setting.run(plan_of(max_tokens=20)).token_ids
    prefill, first, *others = setting.extends
    assert (prefill.token_ids, first.token_ids) == ((1, 2, 3), (tokens[0],))
    assert others
    text = [1, 2, 3, *tokens]
    for extend in others:
        assert len(extend.token_ids) == 2
        # One of them is the last draft token, the other the bonus.
        assert list(extend.token_ids) == text[extend.num_kept_tokens : extend.num_kept_tokens + 2]
    assert [extend.num_kept_tokens for extend in others] == [6, 10, 14, 18][: len(others)]


def test_there_is_no_hole_after_a_rejection() -> None:
    setting = Setting(draft_rows=reversed_rows(ROWS), draft_length=3)
    driven = setting.run(plan_of(temperature=0.0))
    assert driven.loop.spec_stats.num_accepted_tokens == 0
    assert {len(extend.token_ids) for extend in setting.extends[1:]} == {1}


@pytest.mark.parametrize("draft_length", [1, 2, 5])
def test_what_the_draft_lacks_depends_on_the_accepted_count(draft_length: int) -> None:
    """The books are right for every count: the toy draft loses a session whose base or hash is wrong, and none is."""
    setting = Setting(draft_rows=mixed_rows, draft_length=draft_length)
    driven = setting.run(plan_of(max_tokens=200, method=AcceptanceMethod.COUPLED))
    spec_stats = driven.loop.spec_stats
    assert set(spec_stats.accepted_counts) == set(range(draft_length + 1))
    assert spec_stats.num_draft_losses == spec_stats.num_target_losses == spec_stats.num_stale_replies == 0


# Draft lengths.


def test_no_draft_length_exceeds_what_may_still_come() -> None:
    setting = Setting(draft_length=4)
    driven = setting.run(plan_of(max_tokens=7))
    assert len(driven.token_ids) == 7
    assert [extend.draft_length for extend in setting.extends] == [0, 4]
    assert all(
        score.num_kept_tokens + len(score.token_ids) + len(score.draft_token_ids) < 10 for score in setting.scores
    )


def test_what_lengths_are_chosen_by_says_how_much_may_still_come() -> None:
    """Remaining length of a request that resumes elsewhere: without the tokens that its user has."""
    setting = Setting(draft_length=4)
    setting.bench.policy = DraftLengthPolicy(4, is_controlled=True)
    plan = plan_of(max_tokens=9, temperature=0.0)
    for emitted in ((), tuple(own_tokens(plan)[:4])):
        driven = setting.bench.add(replace(plan, emitted_token_ids=emitted))
        assert driven.loop.speculation.num_left == 9 - len(emitted)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_short_output_never_calls_the_draft(max_tokens: int) -> None:
    setting = Setting()
    assert len(setting.run(plan_of(max_tokens=max_tokens)).token_ids) == max_tokens
    assert not setting.bench.sent_to_draft


def test_draft_length_0_never_calls_the_draft() -> None:
    setting = Setting()
    driven = setting.run(plan_of(num_speculative_tokens=0))
    assert not setting.bench.sent_to_draft
    assert driven.loop.spec_stats.num_steps == 24
    assert driven.loop.spec_stats.summary().acceptance_histogram == ()
    assert driven.loop.spec_stats.summary().mean_acceptance_length == 0


def test_a_requests_own_draft_length_counts() -> None:
    setting = Setting(draft_length=4)
    setting.run(plan_of(num_speculative_tokens=2))
    assert max(extend.draft_length for extend in setting.extends) == 2
    setting.run(plan_of(num_speculative_tokens=7))
    assert max(extend.draft_length for extend in setting.extends) == 7


def test_a_draft_with_a_shorter_context_drafts_to_its_end() -> None:
    setting = Setting(draft_length=4)
    setting.bench.facts = DraftFacts(max_length=12)
    driven = setting.run(plan_of(max_tokens=24))
    assert len(driven.token_ids) == 24
    reach = [e.num_kept_tokens + len(e.token_ids) + e.draft_length for e in setting.extends]
    assert max(reach) == 12
    assert setting.scores[-1].draft_token_ids == ()


def test_a_prompt_beyond_the_drafts_context_never_calls_it() -> None:
    setting = Setting()
    setting.bench.facts = DraftFacts(max_length=3)
    assert len(setting.run(plan_of()).token_ids) == 24
    assert not setting.bench.sent_to_draft


def test_a_draft_that_knows_fewer_ids_is_told_so_and_the_target_is_not() -> None:
    setting = Setting()
    setting.bench.facts = DraftFacts(num_token_ids=5)
    setting.run(plan_of())
    assert setting.bench.sent_to_draft[0].num_token_ids == 5
    assert setting.bench.sent_to_target[0].num_token_ids == VOCAB_SIZE


def test_speculation_goes_off_by_load_and_comes_on_again() -> None:
    setting = Setting(disable_by_batch_size=3)
    policy = setting.bench.policy
    plan = plan_of(max_tokens=60, method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    for _ in range(3):
        setting.bench.round()
    num_before = len(setting.extends)
    policy.num_requests = 3
    for _ in range(5):
        setting.bench.round()
    assert len(setting.extends) <= num_before + 1
    num_off = len(setting.extends)
    policy.num_requests = 2
    setting.bench.run()
    later = setting.extends[num_off:]
    assert len(later) > 2
    assert len(later[0].token_ids) > 2  # all that it missed
    assert driven.loop.spec_stats.num_draft_losses == 0
    assert driven.token_ids == own_tokens(plan)


def test_a_session_that_began_under_load_gets_its_draft_later() -> None:
    setting = Setting(disable_by_batch_size=1)
    setting.bench.policy.num_requests = 1
    setting.bench.add(plan_of(max_tokens=40))
    for _ in range(4):
        setting.bench.round()
    assert not setting.bench.sent_to_draft
    setting.bench.policy.num_requests = 0
    setting.bench.run()
    first = setting.extends[0]
    assert first.num_kept_tokens == 0
    assert len(first.token_ids) > 4
    assert first.draft_length == 4


# Ends.


@pytest.mark.parametrize("half_rounds", range(8))
@pytest.mark.parametrize("way", ["cancel", "expire"])
def test_cancelling_and_deadlines_free_both_sides_at_once(half_rounds: int, way: str) -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of())
    for half in range(half_rounds):
        (setting.bench.turn_target if half % 2 else setting.bench.turn_draft)()
    setting.bench.tell(driven, SessionLoop.cancel if way == "cancel" else SessionLoop.expire)
    assert driven.loop.status is SessionStatus.FINISHED
    setting.bench.turn_draft()
    setting.bench.turn_target()
    assert setting.all_is_free()
    if way == "cancel":
        assert driven.ending == Finish(FinishReason.CANCELLED)
    else:
        assert isinstance(driven.ending, Fail)
        assert isinstance(driven.ending.error, DeadlineError)


def test_events_after_the_end_are_ignored() -> None:
    setting = Setting()
    driven = setting.run(plan_of(max_tokens=3))
    for event in (Proposal(1, 99, 3, ()), SessionLost(1, 99, ""), SessionFailed(1, 99, "ModelError", "")):
        driven.loop.on_draft_event(event)
    driven.loop.on_target_event(SessionLost(1, 99, ""))
    for happening in (SessionLoop.cancel, SessionLoop.draft_lost, SessionLoop.target_lost, SessionLoop.target_back):
        happening(driven.loop)
    assert driven.loop.take_actions() == []


@pytest.mark.parametrize("draft_length", [0, 1, 4, 7])
def test_tokens_after_an_end_of_sequence_are_dropped(draft_length: int) -> None:
    plan = plan_of(temperature=0.0, max_tokens=40)
    tokens = own_tokens(plan)
    stop = tokens[6]
    first = tokens.index(stop)
    setting = Setting(draft_length=draft_length)
    driven = setting.run(replace(plan, eos_token_ids=(stop,)))
    assert driven.token_ids == tokens[: first + 1]
    assert driven.ending == Finish(FinishReason.STOP, stop)
    assert setting.all_is_free()


def test_min_tokens_is_told_with_all_endings() -> None:
    setting = Setting()
    plan = plan_of(
        eos_token_ids=(5,),
        stop_token_ids=(2, 5),
        sampling=SamplingParams(temperature=1.0, min_tokens=20),
        max_tokens=24,
    )
    driven = setting.run(plan)
    for sent in (setting.bench.sent_to_draft, setting.bench.sent_to_target):
        assert sent[0].eos_token_ids == (2, 5)
    assert len(driven.token_ids) >= 20
    assert not {2, 5} & set(driven.token_ids[:20])


# Logprobs.


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_of_the_tokens_that_were_emitted(method: AcceptanceMethod) -> None:
    plan = plan_of(method=method, num_logprobs=3, seed=2)
    driven = Setting(draft_rows=OTHER_ROWS).run(plan)
    logprobs = driven.loop.output.logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == driven.token_ids
    text = [1, 2, 3]
    for entry in logprobs:
        row = np.log(ROWS(tuple(text)))
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-5)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == np.argsort(-row)[:3].tolist()
        text.append(entry.token_id)


def test_prompt_logprobs_come_once_and_survive_a_rebuild() -> None:
    setting = Setting(has_draft=False)
    plan = plan_of(num_prompt_logprobs=1)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.target.faults.lose = 1
    setting.bench.run()
    logprobs = driven.loop.prompt_logprobs
    assert logprobs is not None
    assert logprobs[0] is None
    assert [entry.token_id for entry in logprobs if entry] == [2, 3]
    opens = [command for command in setting.bench.sent_to_target if isinstance(command, Open)]
    assert [command.num_prompt_logprobs for command in opens] == [1, None]


def test_logprobs_nobody_asked_for_are_not_asked_for() -> None:
    setting = Setting()
    driven = setting.run(plan_of())
    assert setting.bench.sent_to_target[0].num_logprobs is None
    assert driven.loop.output.logprobs is None


# Figures.


def test_the_summary_adds_up() -> None:
    driven = generate(ToyTarget(ROWS, VOCAB_SIZE).core(), ToyDraft(OTHER_ROWS, VOCAB_SIZE).core(), plan_of(seed=1))
    spec_stats, summary = driven.loop.spec_stats, driven.loop.spec_stats.summary()
    assert summary.num_steps + spec_stats.num_accepted_tokens == 24
    assert sum(summary.acceptance_histogram) == spec_stats.num_drafts
    assert sum(j * n for j, n in enumerate(summary.acceptance_histogram)) == summary.num_accepted_tokens
    assert sum(spec_stats.accepted_per_position()) == summary.num_accepted_tokens
    assert summary.mean_acceptance_length == 1 + summary.num_accepted_tokens / spec_stats.num_drafts
    assert summary.num_accepted_tokens <= summary.num_draft_tokens
