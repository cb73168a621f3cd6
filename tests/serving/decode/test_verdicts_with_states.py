"""Commands that follow from verdicts for drafts that read hidden states: scored draft tokens come with the verdict."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from outrider.batched import U4, U8, ExtendBatch, StateBatch
from outrider.planes import ID_BYTES
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.proposal_channel.verdicts import StateVerdicts, Verdicts
from outrider.serving.decode.begun import asks_for_same, continue_same, extends_after
from outrider.serving.session import Session
from outrider.types import AcceptanceMethod, Grammar, GrammarKind, SamplingParams
from outrider_draft.proposers.head_executor import HeadExecutor
from tests.support.core_driver import open_session

BASE, DRAFTS, FOLLOWING, END = 20, (5, 6, 7), 9, 31
FIRST = BASE - 1


def states_of(num_drafts: int, start: int = FIRST) -> StateBatch:
    return StateBatch(
        b"p" * ID_BYTES, 8, "float32", np.array([start]), np.array([num_drafts + 1], dtype=U4),
        np.array([64], dtype=U8), np.array([3], dtype=U8),
    )  # fmt: skip


def verdict(accepted: int, drafts: tuple[int, ...] = DRAFTS, *, generation: int = 8, base: int = BASE) -> StateVerdicts:
    wide, narrow = (
        (generation,),
        (base, accepted, drafts[accepted - 1] if 0 < accepted <= len(drafts) else 0, FOLLOWING),
    )
    fields = [np.array([value], dtype=U8) for value in (0, *wide)] + [np.array([value], dtype=U4) for value in narrow]
    return StateVerdicts(*fields, states_of(len(drafts)), np.array(drafts, dtype=U4))  # type: ignore[call-arg, arg-type]


def follow(
    found: Verdicts, *, held: int = BASE, ending: tuple[int, ...] = (), reads_states: bool = True
) -> ExtendBatch | None:
    opened = open_session(prompt_length=9, max_length=90, num_token_ids=200, eos_token_ids=ending)
    session = Session(0, opened, SimpleNamespace(length=held), 90, 7, num_committed=BASE)
    table: Any = SimpleNamespace(get=lambda *_: session, prefix_hash=lambda *_: EMPTY_PREFIX)
    executor: Any = SimpleNamespace(reads_states=reads_states, follows_verdicts=lambda _: True)
    return extends_after(table, executor, 0, found, {})


@pytest.mark.parametrize("accepted", range(len(DRAFTS) + 1))
def test_a_draft_is_given_what_was_accepted_with_its_states(accepted: int) -> None:
    found = follow(verdict(accepted))
    assert found is not None
    (item,) = found.items()
    assert (item.num_kept_tokens, item.token_ids) == (BASE, (*DRAFTS[:accepted], FOLLOWING))
    assert item.draft_length == len(DRAFTS)
    assert item.hidden_states is not None
    assert (item.hidden_states.start, item.hidden_states.end) == (FIRST, FIRST + accepted + 1)


@pytest.mark.parametrize(
    ("found", "more"),
    [
        (verdict(4), {}),
        (verdict(0, ()), {}),
        (verdict(2, generation=7), {}),
        (verdict(2, base=BASE - 1), {}),
        (verdict(2), {"held": BASE + 1}),
        (verdict(2), {"ending": (END, DRAFTS[1])}),
        (verdict(2), {"ending": (FOLLOWING,)}),
        (verdict(2), {"reads_states": False}),
        (Verdicts(*[getattr(verdict(2), name) for name in Verdicts.__slots__]), {}),
    ],
)
def test_nothing_follows_from_other_verdicts(found: Verdicts, more: dict[str, Any]) -> None:
    assert follow(found, **more) is None


def test_a_draft_token_that_ends_a_text_and_was_not_accepted_does_not_end_it() -> None:
    assert follow(verdict(2), ending=(END, DRAFTS[2])) is not None


def test_states_of_other_positions_are_another_command() -> None:
    begun = follow(verdict(2))
    assert begun is not None and begun.states is not None
    newer = replace(begun, generations=begun.generations + U8.type(2))
    others = replace(newer, states=replace(begun.states, starts=begun.states.starts - 1))
    for batched, is_same in ((newer, True), (others, False), (replace(newer, states=None), False)):
        assert continue_same(batched, begun) is is_same
        ((item, own),) = zip(batched.items(), begun.items(), strict=True)
        assert asks_for_same(item, own) is is_same


@pytest.mark.parametrize(
    ("sampling", "method", "follows"),
    [
        (SamplingParams(temperature=0.0), AcceptanceMethod.REJECTION, True),
        (SamplingParams(temperature=0.9), AcceptanceMethod.COUPLED, True),
        (SamplingParams(temperature=0.9), AcceptanceMethod.REJECTION, False),
    ],
)
def test_a_head_follows_verdicts_where_the_target_knows_them(
    sampling: SamplingParams, method: AcceptanceMethod, *, follows: bool
) -> None:
    """No session that is to take turns, has a grammar, or is still given its prompt."""
    opened = open_session(
        prompt_length=9, max_length=90, num_token_ids=200, sampling=sampling, acceptance_method=method
    )
    grammar = Grammar(GrammarKind.REGEX, "a+")
    for own, is_decoding, expected in (
        (opened, True, follows),
        (opened, False, False),
        (replace(opened, in_turn=True), True, False),
        (replace(opened, sampling=replace(sampling, grammar=grammar)), True, False),
    ):
        head = cast("HeadExecutor", SimpleNamespace(is_decoding=lambda _, found=is_decoding: found))
        session = Session(0, own, cast("Any", SimpleNamespace()), 90, 7)
        assert HeadExecutor.follows_verdicts(head, session) is expected
