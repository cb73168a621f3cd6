"""Token rules: made once for a session, and gone with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.sampling import process_logits
from outrider.sampling.session import SessionSampling
from tests.sampling.building import opening, row

VOCAB = 12
CPU = torch.device("cpu")


class Counted(tuple[Any, ...]):
    """A tuple that counts how often it is looped over."""

    num_loops = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).num_loops += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("allowed_token_ids", (1, 2, 3)),
        ("logit_bias", ((1, 2.0), (2, -1.0))),
        ("bad_words", ((1,), (2, 3))),
        ("eos_token_ids", (4, 5)),
        ("banned_token_ids", (6,)),
    ],
)
def test_a_list_is_looped_over_when_a_session_begins_and_not_with_each_forward(name: str, values: Any) -> None:
    fields: dict[str, Any] = {"min_tokens": 5, name: Counted(values)}
    session = SessionSampling(opening(**fields))
    first = process_logits(torch.zeros(2, VOCAB), [row(session), row(session)])
    Counted.num_loops = 0
    again = process_logits(torch.zeros(2, VOCAB), [row(session), row(session)])
    assert Counted.num_loops == 0
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.zeros(2, VOCAB))


def test_nothing_of_a_session_outlives_it() -> None:
    session = SessionSampling(opening(banned_token_ids=(3,)))
    process_logits(torch.zeros(1, VOCAB), [row(session)])
    banned = session.token_rules(VOCAB, CPU).banned
    assert banned is not None
    gone = weakref.ref(banned)
    del session, banned
    gc.collect()
    assert gone() is None


def test_a_vocabulary_has_rules_of_its_own() -> None:
    session = SessionSampling(opening(allowed_token_ids=(1, VOCAB + 2)))
    small, large = session.token_rules(VOCAB, CPU), session.token_rules(VOCAB + 5, CPU)
    assert small.banned is not None
    assert large.banned is not None
    assert [len(small.banned), len(large.banned)] == [VOCAB, VOCAB + 5]
    assert (~small.banned).nonzero().flatten().tolist() == [1]
    assert (~large.banned).nonzero().flatten().tolist() == [1, VOCAB + 2]


def test_biases_of_one_token_add_up() -> None:
    processed = process_logits(torch.zeros(1, VOCAB), [row(opening(logit_bias=((3, 1.5), (3, 2.0))))])
    assert processed[0, 3].item() == 3.5
