"""Masks of the positions of a forward: those of a matcher, by whichever thread they are made."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from outrider.errors import IntegrityError, InvalidRequestError
from outrider.structured_output import MaskThreads, Matcher, Outcome, PositionMasks, joined_words, made_within
from outrider.structured_output.matcher import MaskExecutors
from outrider.types import Grammar, GrammarKind
from tests.structured_output.vocabularies import letters

COMPILER = letters("abc")
END = 3
TEXTS = Grammar(GrammarKind.CHOICE, json.dumps(["abcabc", "abbb", "ca"]))


def matcher() -> Matcher:
    return COMPILER.compile(TEXTS, (END,))


def allowed(masks: PositionMasks, position: int) -> set[int]:
    words = masks.at(position)
    assert words is not None
    return {token_id for token_id in range(4) if words[0] >> token_id & 1}


@pytest.mark.parametrize("begins", (True, False), ids=("threads", "without threads"))
def test_masks_are_those_after_each_draft_token(begins: bool) -> None:
    several = [
        PositionMasks(matcher, (0, 1), (2, 0), position=12),
        PositionMasks(matcher, (), (2, 0), position=5),
        PositionMasks(matcher, (2,), (), position=6),
    ]
    if begins:
        MaskThreads().begin(several)
    assert [allowed(several[0], position) for position in (12, 13, 14)] == [{1, 2}, {0}, {1}]
    assert [allowed(several[1], position) for position in (5, 6, 7)] == [{0, 2}, {0}, {END}]
    assert allowed(several[2], 6) == {0}
    within = made_within(several)
    assert within is not None and within[0] <= min(each.began_ns for each in several)
    assert made_within([]) is None


def test_nothing_is_masked_after_a_refused_draft_token_or_an_end() -> None:
    refused = PositionMasks(matcher, (0,), (0, 1), position=1)
    assert allowed(refused, 1) == {1}
    assert refused.at(2) is None and refused.at(3) is None
    ended = PositionMasks(matcher, (2, 0), (END, 1), position=2)
    assert allowed(ended, 2) == {END}
    assert ended.at(3) is None
    assert matcher().follow((2, 0, END)) is Outcome.ENDED


@pytest.mark.parametrize("begins", (True, False), ids=("threads", "without threads"))
def test_an_output_that_the_grammar_refuses_fails_its_session_alone(begins: bool) -> None:
    """Failure instead of unmasked output."""
    refused = PositionMasks(matcher, (0, 0), (1,), position=7)
    others = [PositionMasks(matcher, (2,), (), position=4), PositionMasks(matcher, (2, 0, END), (), position=9)]
    if begins:
        MaskThreads().begin([refused, *others])
    words = refused.at(7)
    assert words is not None and not words.any() and not refused.all_positions(1).any()
    assert isinstance(refused.error, IntegrityError)
    assert "output before position 7 is refused by the request's grammar" in str(refused.error)
    assert allowed(others[0], 4) == {0} and others[1].at(9) is None
    assert [each.error for each in others] == [None, None]


def test_masks_that_were_made_together_are_joined_without_a_copy() -> None:
    held = [matcher() for _ in range(3)]
    drafts, texts = ((2, 0), (), (0, 1)), ((0, 1), (2,), (0,))

    def masks(refused: int = 0) -> list[PositionMasks]:
        outputs = [(*text, *[END, 1][:refused]) for text in texts]
        return [
            PositionMasks(partial(_same, found), output, draft, position=3, is_compiled=True)
            for found, output, draft in zip(held, outputs, drafts, strict=True)
        ]

    together, each_alone, failing = masks(), masks(), masks(refused=1)
    MaskThreads().begin(together, is_awaited=True)
    joined = joined_words(together, 1)
    assert np.shares_memory(joined, together[0].all_positions(1)) and joined.shape == (7, 1)
    wanted = np.concatenate([one.all_positions(1) for one in each_alone])
    assert np.array_equal(joined, wanted) and np.array_equal(joined_words(each_alone, 1), wanted)
    assert np.array_equal(joined_words(together[::-1], 1), np.concatenate((wanted[4:], wanted[3:4], wanted[:3])))
    assert np.array_equal(joined_words(together, 2)[:, :1], wanted)  # of a larger vocabulary
    MaskThreads().begin(failing, is_awaited=True)
    assert failing[0].error is not None and not joined_words(failing, 1)[:3].any()


def test_tokens_that_are_consumed_together_are_those_of_each_session() -> None:
    held, made = [matcher() for _ in range(4)], MaskThreads()

    def begin(outputs: Sequence[tuple[int, ...]]) -> list[PositionMasks]:
        found = [
            PositionMasks(partial(_same, each), output, (), position=9, is_compiled=True)
            for each, output in zip(held, outputs, strict=True)
        ]
        made.begin(found, is_awaited=True)
        return found

    begin([()] * 4)
    first = begin([(0,), (1,), (2,), (END,)])
    assert [allowed(first[place], 9) for place in (0, 2)] == [{1}, {0}]
    assert isinstance(first[1].error, IntegrityError) and isinstance(first[3].error, IntegrityError)
    second = begin([(0, 1), (0,), (2, 0), (2,)])
    assert [allowed(each, 9) for each in second] == [{1, 2}, {1}, {END}, {0}]
    third = begin([(2,), (0, 1), (2, 0, END), (2, 9)])
    assert [allowed(each, 9) for each in third[:2]] == [{0}, {1, 2}] and third[2].at(9) is None
    assert isinstance(third[3].error, IntegrityError)


def test_an_engine_that_fails_while_tokens_are_consumed_together_costs_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    held, made = [matcher(), matcher()], MaskThreads()
    broken = partial(PositionMasks, position=4, is_compiled=True)
    made.begin([broken(partial(_same, each), (), ()) for each in held], is_awaited=True)
    monkeypatch.setattr(MaskExecutors, "of", fail)
    masks = [broken(partial(_same, each), (0,), ()) for each in held]
    made.begin(masks, is_awaited=True)
    assert [allowed(each, 4) for each in masks] == [{1}, {1}]


def test_a_grammar_that_cannot_be_compiled_leaves_no_token_and_says_why() -> None:
    def fail() -> Matcher:
        raise InvalidRequestError("regex", "is wrong")

    failing, sound = PositionMasks(fail, (), (0,), position=0), PositionMasks(matcher, (2,), (), position=1)
    MaskThreads().begin([failing, sound])
    words = failing.at(0)
    assert words is not None and not np.any(words)
    assert failing.error is not None and failing.error.field == "regex"
    assert allowed(sound, 1) == {0} and sound.error is None


def test_masks_are_made_while_the_caller_does_something_else() -> None:
    may_end, has_begun = threading.Event(), threading.Event()

    def wait() -> Matcher:
        has_begun.set()
        assert may_end.wait(120)
        return matcher()

    masks = PositionMasks(wait, (), (), position=0)
    MaskThreads().begin([masks])
    assert has_begun.wait(120) and not masks.ended_ns
    may_end.set()
    assert allowed(masks, 0) == {0, 2}


@pytest.mark.parametrize("is_awaited", (True, False))
@pytest.mark.parametrize("place", ("compile", "follow", "complete"))
def test_an_engine_that_raises_fails_its_own_session_alone(
    monkeypatch: pytest.MonkeyPatch, place: str, is_awaited: bool
) -> None:
    broken, sound = matcher(), matcher()

    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    if place != "compile":
        monkeypatch.setattr(broken, place, fail)
    find = fail if place == "compile" else lambda: broken
    several = [
        PositionMasks(find, (), (), position=3, is_compiled=True),
        PositionMasks(lambda: sound, (0,), (), position=4, is_compiled=True),
    ]
    MaskThreads().begin(several, is_awaited=is_awaited)
    assert allowed(several[1], 4) == {1} and several[1].error is None
    words = several[0].at(3)
    assert isinstance(several[0].error, IntegrityError) and words is not None and not words.any()
    assert "RuntimeError: a bug" in str(several[0].error)


def _same(found: Matcher) -> Matcher:
    return found


def test_many_matchers_of_one_grammar_share_several_lexers() -> None:
    compiler = letters("abc")
    compiler.num_lexers = 3
    held = [compiler.compile(TEXTS, (END,)) for _ in range(40)]
    assert len({id(each.grammar) for each in held}) == 3
    masks = [PositionMasks(partial(_same, each), (0,), (1,), position=4, is_compiled=True) for each in held]
    MaskThreads().begin(masks)
    assert all(allowed(each, 4) == {1} and allowed(each, 5) == {1, 2} for each in masks)
    del held, masks
