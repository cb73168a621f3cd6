"""Many requests are looked at together first, which may not miss what is found one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from outrider.sampling import ScoreRequest
from outrider.sampling.scoring.contract import broken_contract, keep_contract
from outrider.sampling.session import SessionSampling
from outrider.types import Support
from tests.sampling.building import COUPLED, REJECTION, TYPICAL, opening, support_of

VOCAB_SIZE = 50
METHODS = (REJECTION, COUPLED, TYPICAL)


def request(*draft_token_ids: int, support: Support | None = None, **changes: Any) -> ScoreRequest:
    return ScoreRequest(SessionSampling(opening(**changes)), (1, 2, 3), 3, draft_token_ids, support)


def random_request(choose: random.Random, *, is_odd: bool) -> ScoreRequest:
    """A sound one, or one in which something small may be wrong."""
    drafts = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(4))]
    rows = [choose.sample(range(VOCAB_SIZE), choose.randrange(4)) for _ in drafts]
    if is_odd and drafts and choose.random() < 0.5:
        choose.choice([drafts, *filter(None, rows)])[-1] = choose.choice((-1, VOCAB_SIZE))
    support = support_of(rows) if drafts else None
    if is_odd and support is not None and choose.random() < 0.5:
        counts = support.counts + np.array([choose.choice((-1, 0, 1)) for _ in rows], dtype=np.int32)
        support = choose.choice((None, Support(counts, support.token_ids), Support(counts[1:], support.token_ids)))
    temperature = choose.choice((0.0, 1.0))
    return ScoreRequest(
        SessionSampling(opening(choose.choice(METHODS), temperature=temperature)), (1,), 1, tuple(drafts), support
    )


@pytest.mark.parametrize("is_odd", [False, True])
def test_all_keep_it_where_none_breaks_it(*, is_odd: bool) -> None:
    choose = random.Random(7)
    answers = set()
    for _ in range(400):
        requests = [random_request(choose, is_odd=is_odd) for _ in range(choose.randrange(5))]
        unbroken = all(broken_contract(one, VOCAB_SIZE) is None for one in requests)
        assert keep_contract(requests, VOCAB_SIZE) == unbroken
        answers.add(unbroken)
    assert answers == ({True, False} if is_odd else {True})


def test_counts_that_add_up_past_32_bits_do_not_pass_for_few() -> None:
    counts = np.array([2**31 - 1, 2**31 - 1, 3], dtype=np.int32)
    broken = request(1, 2, 3, support=Support(counts, np.array([4], dtype=np.int32)))
    assert not keep_contract([broken], VOCAB_SIZE)
    assert broken_contract(broken, VOCAB_SIZE) is not None


def test_ids_below_a_neighbours_limit_alone_are_looked_at_again() -> None:
    narrow, wide = request(3, num_token_ids=10, temperature=0), request(20, temperature=0)
    assert not keep_contract([narrow, wide], VOCAB_SIZE)
    assert broken_contract(narrow, VOCAB_SIZE) is broken_contract(wide, VOCAB_SIZE) is None


def test_a_support_without_drafts_breaks_it() -> None:
    assert not keep_contract([request(support=support_of([[4]]))], VOCAB_SIZE)
    assert broken_contract(request(support=support_of([[4]])), VOCAB_SIZE) is not None
