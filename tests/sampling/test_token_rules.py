"""Token rules: worked out once for a session, and forgotten when many need the room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.sampling import process_logits, token_rules
from outrider.sampling.token_rules import rules_of
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
    open_ = opening(**fields)
    first = process_logits(torch.zeros(2, VOCAB), [row(open_), row(open_)])
    Counted.num_loops = 0
    again = process_logits(torch.zeros(2, VOCAB), [row(open_), row(open_)])
    assert Counted.num_loops == 0
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.zeros(2, VOCAB))


def test_the_first_is_forgotten_when_the_room_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_rules, "MOST_REMEMBERED_BYTES", 3 * VOCAB)
    remembered = token_rules._RememberedRules()
    opens = [opening(banned_token_ids=(number,)) for number in range(9)]
    for open_ in opens:
        remembered(open_, VOCAB, CPU)
    assert 1 <= len(remembered._found) < len(opens)
    assert remembered(opens[0], VOCAB, CPU).banned is not None  # worked out anew


def test_a_vocabulary_has_rules_of_its_own() -> None:
    open_ = opening(allowed_token_ids=(1, VOCAB + 2))
    small, large = rules_of(open_, VOCAB, CPU), rules_of(open_, VOCAB + 5, CPU)
    assert small.banned is not None
    assert large.banned is not None
    assert [len(small.banned), len(large.banned)] == [VOCAB, VOCAB + 5]
    assert (~small.banned).nonzero().flatten().tolist() == [1]
    assert (~large.banned).nonzero().flatten().tolist() == [1, VOCAB + 2]


def test_biases_of_one_token_add_up() -> None:
    processed = process_logits(torch.zeros(1, VOCAB), [row(opening(logit_bias=((3, 1.5), (3, 2.0))))])
    assert processed[0, 3].item() == 3.5
