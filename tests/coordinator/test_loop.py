"""The state machine of one session, driven by hand against toy services: no event loop, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.actions import Fail, Finish
from coordinator.loop import SessionLoop, Waiting
from coordinator.plan import Plan
from coordinator.sides import MAX_LOSSES_IN_A_ROW, DraftFacts
from outrider.errors import DeadlineError, InvalidRequestError, NonFiniteLogitsError, ProtocolError, UnavailableError
from outrider.ports import (
    Branches,
    Extend,
    Open,
    Proposal,
    Release,
    Score,
    Scores,
    SessionFailed,
    SessionLost,
)
from outrider.types import (
    AcceptanceMethod,
    FinishReason,
    SamplingParams,
    SparseEvidence,
    TokenScores,
    extend_prefix_hash,
)
from tests.coordinator.driving import Bench, Driven, generate, make_plan
from tests.support.scripted_ports import ToyDraft, ToyTarget, random_rows, reversed_rows

VOCAB_SIZE = 8
ROWS = random_rows(VOCAB_SIZE, seed=1)
OTHER_ROWS = random_rows(VOCAB_SIZE, seed=2)
METHODS = tuple(AcceptanceMethod)


def mixed_rows(tokens: tuple[int, ...]) -> np.ndarray:
    """A middling draft."""
    return np.asarray(0.7 * ROWS(tokens) + 0.3 * OTHER_ROWS(tokens))


class Setting:
    """A bench over toys, and the toys."""

    def __init__(self, *, draft_rows: Any = ROWS, has_draft: bool = True, draft_length: int = 4, **policy: Any) -> None:
        self.target, self.draft = ToyTarget(ROWS, VOCAB_SIZE), ToyDraft(draft_rows, VOCAB_SIZE)
        self.target_core, self.draft_core = self.target.core(), self.draft.core()
        draft = self.draft_core if has_draft else None
        self.bench = Bench(self.target_core, draft, draft_length=draft_length, **policy)

    def run(self, plan: Plan) -> Driven:
        driven = self.bench.add(plan)
        self.bench.run()
        return driven

    @property
    def extends(self) -> list[Extend]:
        return [command for command in self.bench.sent_to_draft if isinstance(command, Extend)]

    @property
    def scores(self) -> list[Score]:
        return [command for command in self.bench.sent_to_target if isinstance(command, Score)]

    def all_is_free(self) -> bool:
        return not (
            self.target_core.sessions
            or self.draft_core.sessions
            or self.bench.to_draft
            or self.bench.to_target
        )  # fmt: skip


def plan_of(**fields: Any) -> Plan:
    return make_plan(vocab_size=VOCAB_SIZE, **{"prompt": (1, 2, 3), "max_tokens": 24, **fields})


def own_tokens(plan: Plan) -> list[int]:
    """What the target alone gives."""
    setting = Setting(has_draft=False)
    return setting.run(plan).token_ids


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
@pytest.mark.parametrize("dense", [False, True])
def test_a_draft_equal_to_the_target_is_always_accepted_by_exact_rules(method: AcceptanceMethod, dense: bool) -> None:
    tally = Setting().run(plan_of(method=method, dense=dense, max_tokens=41)).loop.tally
    if method is AcceptanceMethod.TYPICAL:
        assert 0 < tally.num_accepted_tokens < tally.num_draft_tokens
    else:
        assert tally.num_accepted_tokens == tally.num_draft_tokens == 32
        assert tally.num_steps == 1 + 8


# The messages.


def test_prefill_goes_to_both_sides_at_once() -> None:
    bench = Setting().bench
    bench.add(plan_of(seed=9))
    opened, extend = bench.to_draft
    assert isinstance(opened, Open)
    assert isinstance(extend, Extend)
    assert (extend.token_ids, extend.draft_length, extend.base_length, extend.prefix_hash) == ((1, 2, 3), 0, 0, 0)
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
        assert command.prefix_hash == extend_prefix_hash(0, text[: command.base_length])
        assert list(command.token_ids) == text[command.base_length : command.base_length + len(command.token_ids)]
        assert command.token_ids


def test_the_target_is_brought_one_token_a_step() -> None:
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.run(plan_of())
    assert [len(score.token_ids) for score in setting.scores] == [3] + [1] * (len(setting.scores) - 1)


def test_the_bonus_token_hole() -> None:
    """After all K drafts were accepted the draft lacks the last of them: its next Extend brings two tokens."""
    setting = Setting(draft_length=3)
    tokens = setting.run(plan_of(max_tokens=20)).token_ids
    prefill, first, *others = setting.extends
    assert (prefill.token_ids, first.token_ids) == ((1, 2, 3), (tokens[0],))
    assert others
    text = [1, 2, 3, *tokens]
    for extend in others:
        assert len(extend.token_ids) == 2
        # One of them is the last draft token, the other the bonus.
        assert list(extend.token_ids) == text[extend.base_length : extend.base_length + 2]
    assert [extend.base_length for extend in others] == [6, 10, 14, 18][: len(others)]


def test_there_is_no_hole_after_a_rejection() -> None:
    setting = Setting(draft_rows=reversed_rows(ROWS), draft_length=3)
    driven = setting.run(plan_of(temperature=0.0))
    assert driven.loop.tally.num_accepted_tokens == 0
    assert {len(extend.token_ids) for extend in setting.extends[1:]} == {1}


@pytest.mark.parametrize("draft_length", [1, 2, 5])
def test_what_the_draft_lacks_depends_on_the_accepted_count(draft_length: int) -> None:
    """The books are right for every count: the toy draft loses a session whose base or hash is wrong, and none is."""
    setting = Setting(draft_rows=mixed_rows, draft_length=draft_length)
    driven = setting.run(plan_of(max_tokens=200, method=AcceptanceMethod.COUPLED))
    tally = driven.loop.tally
    assert set(tally.accepted_counts) == set(range(draft_length + 1))
    assert tally.num_draft_losses == tally.num_target_losses == tally.num_stale_replies == 0


# Draft lengths.


def test_no_draft_length_exceeds_what_may_still_come() -> None:
    setting = Setting(draft_length=4)
    driven = setting.run(plan_of(max_tokens=7))
    assert len(driven.token_ids) == 7
    assert [extend.draft_length for extend in setting.extends] == [0, 4]
    assert all(score.base_length + len(score.token_ids) + len(score.draft_token_ids) < 10 for score in setting.scores)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_short_output_never_calls_the_draft(max_tokens: int) -> None:
    setting = Setting()
    assert len(setting.run(plan_of(max_tokens=max_tokens)).token_ids) == max_tokens
    assert not setting.bench.sent_to_draft


def test_draft_length_0_never_calls_the_draft() -> None:
    setting = Setting()
    driven = setting.run(plan_of(num_speculative_tokens=0))
    assert not setting.bench.sent_to_draft
    assert driven.loop.tally.num_steps == 24
    assert driven.loop.tally.summary().acceptance_histogram == ()
    assert driven.loop.tally.summary().mean_acceptance_length == 0


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
    reach = [e.base_length + len(e.token_ids) + e.draft_length for e in setting.extends]
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
    policy.set_load(3)
    for _ in range(5):
        setting.bench.round()
    assert len(setting.extends) <= num_before + 1
    num_off = len(setting.extends)
    policy.set_load(2)
    setting.bench.run()
    later = setting.extends[num_off:]
    assert len(later) > 2
    assert len(later[0].token_ids) > 2  # all that it missed
    assert driven.loop.tally.num_draft_losses == 0
    assert driven.token_ids == own_tokens(plan)


def test_a_session_that_began_under_load_gets_its_draft_later() -> None:
    setting = Setting(disable_by_batch_size=1)
    setting.bench.policy.set_load(1)
    setting.bench.add(plan_of(max_tokens=40))
    for _ in range(4):
        setting.bench.round()
    assert not setting.bench.sent_to_draft
    setting.bench.policy.set_load(0)
    setting.bench.run()
    first = setting.extends[0]
    assert first.base_length == 0
    assert len(first.token_ids) > 4
    assert first.draft_length == 4


# A draft that is late, lost, full or wrong.


def silence_draft(setting: Setting, plan: Plan) -> Driven:
    """A session in the middle, whose draft has been asked and stays silent past its time."""
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.draft_answers = False
    setting.bench.round()
    assert driven.loop.waiting is Waiting.DRAFT
    setting.bench.time_out()
    return driven


def test_a_late_draft_costs_no_tokens_and_is_not_asked_again_before_it_answers() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40, method=AcceptanceMethod.COUPLED)
    driven = silence_draft(setting, plan)
    num_asked = len(setting.extends)
    for _ in range(6):
        setting.bench.round()
    assert len(setting.extends) == num_asked
    assert driven.loop.tally.num_draft_timeouts == 1
    assert len(driven.token_ids) >= 6
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


def test_a_late_reply_says_what_the_draft_holds() -> None:
    setting = Setting()
    driven = silence_draft(setting, plan_of(max_tokens=40))
    late = setting.extends[-1]
    for _ in range(3):
        setting.bench.round()
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    setting.bench.run()
    following = setting.extends[setting.extends.index(late) + 1]
    assert following.base_length == late.base_length + len(late.token_ids)
    assert len(following.token_ids) == 4  # what was emitted meanwhile
    assert driven.loop.tally.num_draft_losses == 0
    assert sum(isinstance(command, Open) for command in setting.bench.sent_to_draft) == 1


def test_a_late_proposal_is_not_judged() -> None:
    setting = Setting()
    driven = silence_draft(setting, plan_of(max_tokens=40))
    setting.bench.deliver_draft(setting.bench.late)  # before the scores of the step that went without it
    setting.bench.turn_target()
    assert setting.scores[-1].draft_token_ids == ()
    assert driven.loop.tally.num_drafts == 0


def test_a_draft_still_at_its_prefill_is_waited_for_and_then_asked() -> None:
    setting = Setting()
    setting.bench.draft_answers = False
    driven = setting.bench.add(plan_of())
    setting.bench.round()
    assert driven.loop.waiting is Waiting.DRAFT
    assert driven.timer is not None
    assert len(setting.extends) == 1
    setting.bench.draft_answers = True
    setting.bench.deliver_draft(setting.bench.late)
    assert driven.loop.waiting is Waiting.DRAFT
    setting.bench.run()
    assert driven.loop.tally.num_drafts > 0
    assert driven.loop.tally.num_draft_timeouts == 0


def test_a_timer_of_an_earlier_step_rings_for_nobody() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of())
    setting.bench.round()
    old = driven.timer
    assert old is not None
    setting.bench.round()
    setting.bench.tell(driven, lambda loop: loop.draft_timed_out(old))
    assert driven.loop.tally.num_draft_timeouts == 0


def test_stale_replies_change_nothing() -> None:
    plan = plan_of(max_tokens=40, seed=4)
    expected = Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    setting = Setting(draft_rows=OTHER_ROWS)
    setting.target.faults.stale = setting.draft.faults.stale = True
    driven = setting.run(plan)
    assert driven.token_ids == expected
    assert driven.loop.tally.num_stale_replies > 10


def test_pushed_branches_are_ignored() -> None:
    setting, plan = Setting(), plan_of(seed=3)
    setting.bench.change_draft_events = lambda events: [
        *(Branches(event.session, event.generation, 0, ()) for event in events), *events
    ]  # fmt: skip
    assert setting.run(plan).token_ids == Setting().run(plan).token_ids


@pytest.mark.parametrize("rounds", range(5))
def test_a_draft_lost_halfway_and_back(rounds: int) -> None:
    setting, plan = Setting(), plan_of(max_tokens=60, method=AcceptanceMethod.COUPLED, seed=2)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.to_draft.clear()
    setting.draft_core.release_all()
    setting.bench.tell(driven, SessionLoop.draft_lost)
    for _ in range(4):
        setting.bench.turn_target()
        assert not setting.bench.to_draft
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    num_before = len(setting.extends)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert setting.extends[num_before].base_length == 0
    assert setting.extends[-1].draft_length > 0
    assert driven.loop.tally.num_draft_losses == 0


def test_a_draft_lost_while_its_proposal_is_judged_changes_nothing() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(seed=1))
    setting.bench.round()
    setting.bench.turn_draft()
    assert setting.bench.to_target[-1].draft_token_ids
    setting.bench.tell(driven, SessionLoop.draft_lost)
    setting.bench.run()
    assert driven.loop.tally.num_drafts == 1
    assert len(driven.token_ids) == 24


def test_a_session_the_draft_lost_is_rebuilt_within_the_step() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40, seed=8)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.bench.round()
    setting.draft.faults.lose = 1
    setting.bench.run()
    assert driven.loop.tally.num_draft_losses == 1
    assert driven.token_ids == Setting().run(plan).token_ids  # the same draft lengths, so the same tokens
    opens = [command for command in setting.bench.sent_to_draft if isinstance(command, Open)]
    assert len(opens) == 2
    assert opens[1].generation > opens[0].generation


def test_a_draft_that_loses_the_session_again_and_again_is_left_alone_for_a_while() -> None:
    setting, plan = Setting(), plan_of(max_tokens=30, method=AcceptanceMethod.COUPLED)
    setting.draft.faults.lose = 10_000
    driven = setting.run(plan)
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.tally.num_draft_losses == MAX_LOSSES_IN_A_ROW + 1
    assert len(driven.retries) == 1


def test_a_draft_without_room_is_tried_again_when_told() -> None:
    setting, plan = Setting(), plan_of(max_tokens=40)
    setting.draft.faults.refuse = 1
    driven = setting.bench.add(plan)
    for _ in range(3):
        setting.bench.round()
    assert [retry.retry_after_ms for retry in driven.retries] == [20]
    assert len(setting.extends) == 1
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    setting.bench.run()
    assert driven.loop.tally.num_drafts > 3


def test_a_session_that_failed_on_the_draft_goes_on_without() -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    setting.bench.round()
    setting.draft.faults.fail = 1
    setting.bench.tell(driven, lambda loop: loop.draft_back(DraftFacts()))
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.tally.num_drafts == 0


Change = Callable[[Proposal], Proposal]


def spoil(change: Change) -> Callable[[list[Any]], list[Any]]:
    def changed(events: list[Any]) -> list[Any]:
        return [change(e) if isinstance(e, Proposal) and e.token_ids else e for e in events]

    return changed


def scale(proposal: Proposal) -> Proposal:
    assert isinstance(proposal.evidence, SparseEvidence)
    return replace(proposal, evidence=replace(proposal.evidence, probs=proposal.evidence.probs * np.float32(1.01)))


@pytest.mark.parametrize(
    "change",
    [
        scale,
        lambda proposal: replace(proposal, evidence=None),
        lambda proposal: replace(proposal, token_ids=(VOCAB_SIZE, *proposal.token_ids[1:])),
        lambda proposal: replace(proposal, token_ids=proposal.token_ids[:-1]),
        lambda proposal: replace(proposal, base_length=proposal.base_length - 1),
    ],
    ids=["sum", "none", "id", "count", "base"],
)
def test_bad_evidence_means_no_drafts_for_the_step_and_a_counter(change: Change) -> None:
    setting, plan = Setting(), plan_of(seed=6)
    setting.bench.change_draft_events = spoil(change)
    driven = setting.run(plan)
    assert driven.token_ids == own_tokens(plan)
    assert driven.loop.tally.num_bad_evidence > 3
    assert driven.loop.tally.num_drafts == 0


def test_fewer_tokens_than_asked_for_and_none_are_fine() -> None:
    for kept in (0, 2):
        setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
        setting.bench.change_draft_events = spoil(
            lambda proposal, kept=kept: replace(proposal, token_ids=proposal.token_ids[:kept])  # type: ignore[misc]
        )
        driven = setting.run(plan)
        assert driven.token_ids == own_tokens(plan)
        assert driven.loop.tally.num_bad_evidence == 0
        assert set(driven.loop.tally.draft_lengths) == ({kept, 1} if kept else set())


# A target that loses sessions, has no room, or fails.


@pytest.mark.parametrize("rounds", range(4))
def test_a_session_the_target_lost_is_rebuilt_and_no_token_is_lost_or_repeated(rounds: int) -> None:
    plan = plan_of(max_tokens=40, seed=8)
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.target.faults.lose = 1
    setting.bench.run()
    assert driven.token_ids == Setting(draft_rows=OTHER_ROWS).run(plan).token_ids
    assert driven.loop.tally.num_target_losses == 1
    rebuilt = [score for score in setting.scores if score.base_length == 0]
    assert len(rebuilt) == 2
    assert len(rebuilt[1].token_ids) >= 3


def test_losses_in_a_row_fail_the_request() -> None:
    setting = Setting()
    setting.target.faults.lose = 10_000
    driven = setting.run(plan_of())
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, UnavailableError)
    assert len(setting.scores) == MAX_LOSSES_IN_A_ROW + 1


def test_losses_with_answers_between_do_not_add_up() -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of(max_tokens=60))
    for _ in range(3 * MAX_LOSSES_IN_A_ROW):
        setting.target.faults.lose = 1
        setting.bench.round()
        setting.bench.round()
        setting.bench.round()
    setting.bench.run()
    assert isinstance(driven.ending, Finish)
    assert driven.loop.tally.num_target_losses > MAX_LOSSES_IN_A_ROW


@pytest.mark.parametrize("rounds", range(4))
def test_a_target_lost_and_back(rounds: int) -> None:
    plan = plan_of(max_tokens=40, seed=8)
    setting = Setting(draft_rows=OTHER_ROWS)
    driven = setting.bench.add(plan)
    for _ in range(rounds):
        setting.bench.round()
    setting.bench.turn_draft()
    setting.bench.to_target.clear()
    setting.target_core.release_all()
    setting.bench.tell(driven, SessionLoop.target_lost)
    setting.bench.turn_draft()
    assert not setting.bench.to_target
    setting.bench.tell(driven, SessionLoop.target_back)
    setting.bench.run()
    assert driven.token_ids == Setting(draft_rows=OTHER_ROWS).run(plan).token_ids


def test_a_target_without_room_parks_the_session_and_the_draft_is_released() -> None:
    setting, plan = Setting(), plan_of(seed=3)
    setting.target.faults.refuse = 1
    driven = setting.run(plan)
    assert [park.retry_after_ms for park in driven.parked] == [20]
    assert driven.loop.waiting is Waiting.ADMISSION
    assert setting.all_is_free()
    assert not driven.token_ids
    setting.bench.sessions[77] = driven
    setting.bench.tell(driven, lambda loop: loop.start(77))
    setting.bench.run()
    assert driven.token_ids == Setting().run(plan).token_ids
    assert setting.all_is_free()


def test_a_refusal_at_a_rebuild_keeps_the_tokens() -> None:
    setting, plan = Setting(), plan_of(method=AcceptanceMethod.COUPLED)
    driven = setting.bench.add(plan)
    for _ in range(3):
        setting.bench.round()
    so_far = list(driven.token_ids)
    assert so_far
    setting.target.faults.lose = setting.target.faults.refuse = 1
    setting.bench.run()
    assert driven.parked
    setting.bench.sessions[78] = driven
    setting.bench.tell(driven, lambda loop: loop.start(78))
    assert setting.bench.to_target[-1].token_ids == (1, 2, 3, *so_far)
    setting.bench.run()
    assert driven.token_ids == own_tokens(plan)


def test_a_session_that_failed_on_the_target_fails_with_its_error_and_frees_both() -> None:
    setting = Setting()
    setting.target.faults.fail = 1
    driven = setting.run(plan_of())
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, NonFiniteLogitsError)
    assert setting.all_is_free()


@pytest.mark.parametrize(
    ("event", "error", "field"),
    [
        (("InvalidRequestError", "logit_bias: all masked", "logit_bias"), InvalidRequestError, "logit_bias"),
        (("NoSuchError", "what", ""), ProtocolError, ""),
        (("annotations", "what", ""), ProtocolError, ""),
    ],
)
def test_failures_become_the_error_they_name(event: tuple[str, str, str], error: type, field: str) -> None:
    setting = Setting(has_draft=False)
    driven = setting.bench.add(plan_of())
    code, message, name = event
    driven.loop.on_target_event(SessionFailed(driven.session, 2, code, message, name))
    setting.bench.collect(driven)
    assert isinstance(driven.ending, Fail)
    assert type(driven.ending.error) is error
    assert driven.ending.error.field == field
    assert str(driven.ending.error).count("logit_bias:") == bool(field)


def spoil_scores(**fields: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda events: [replace(event, **fields) if isinstance(event, Scores) else event for event in events]


@pytest.mark.parametrize("fields", [{"base_length": 2}, {"form": TokenScores((99,))}], ids=["base", "id"])
def test_scores_that_break_the_contract_fail_the_request(fields: dict[str, Any]) -> None:
    setting = Setting(has_draft=False)
    setting.bench.change_target_events = spoil_scores(**fields)
    driven = setting.run(plan_of(temperature=0.0))
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, ProtocolError)
    assert setting.all_is_free()


# Ends.


@pytest.mark.parametrize("half_rounds", range(8))
@pytest.mark.parametrize("way", ["cancel", "expire"])
def test_cancelling_and_deadlines_free_both_sides_at_once(half_rounds: int, way: str) -> None:
    setting = Setting()
    driven = setting.bench.add(plan_of())
    for half in range(half_rounds):
        (setting.bench.turn_target if half % 2 else setting.bench.turn_draft)()
    setting.bench.tell(driven, SessionLoop.cancel if way == "cancel" else SessionLoop.expire)
    assert driven.loop.waiting is Waiting.NOTHING
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
@pytest.mark.parametrize("dense", [False, True])
def test_logprobs_are_of_the_tokens_that_were_emitted(method: AcceptanceMethod, dense: bool) -> None:
    plan = plan_of(method=method, dense=dense, num_logprobs=3, seed=2)
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


def test_logprobs_left_out_by_the_target_are_its_error() -> None:
    setting = Setting(has_draft=False)
    setting.bench.change_target_events = spoil_scores(logprobs=())
    driven = setting.run(plan_of(num_logprobs=1))
    assert isinstance(driven.ending, Fail)
    assert isinstance(driven.ending.error, ProtocolError)


# Figures.


def test_the_summary_adds_up() -> None:
    driven = generate(ToyTarget(ROWS, VOCAB_SIZE).core(), ToyDraft(OTHER_ROWS, VOCAB_SIZE).core(), plan_of(seed=1))
    tally, summary = driven.loop.tally, driven.loop.tally.summary()
    assert summary.num_steps - tally.num_drafts + tally.num_gained_tokens == 24
    assert sum(summary.acceptance_histogram) == tally.num_drafts
    assert sum(j * n for j, n in enumerate(summary.acceptance_histogram)) == summary.num_accepted_tokens
    assert sum(tally.accepted_per_position()) == summary.num_accepted_tokens
    assert summary.mean_acceptance_length == 1 + summary.num_accepted_tokens / tally.num_drafts
    assert summary.num_accepted_tokens <= summary.num_draft_tokens
