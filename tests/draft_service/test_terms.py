"""What a draft remembers of its sessions."""

from __future__ import annotations

from draft_service.proposers.terms import KnownTerms
from outrider.types import SamplingParams
from tests.support.core_driver import open_session


def test_terms_are_worked_out_once_for_each_opening_and_stay_those_of_their_own() -> None:
    known = KnownTerms(100)
    opens = [open_session(0, prompt_length=1, max_length=9, num_token_ids=9, seed=seed) for seed in range(5000)]
    found = [known.of(open_) for open_ in opens]
    assert all(terms is not None and terms.open is open_ for terms, open_ in zip(found, opens, strict=True))
    assert known.of(opens[-1]) is found[-1]
    again = known.of(opens[0])  # forgotten since
    assert again is not None
    assert again.open is opens[0]
    cut = open_session(0, prompt_length=1, max_length=9, num_token_ids=9, sampling=SamplingParams(top_p=0.5))
    assert known.of(cut) is None
